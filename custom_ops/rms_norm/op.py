"""lamina::rms_norm, root-mean-square normalisation over the last dimension."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cuda, reference


def rms_norm(
    x: Tensor,  # [num_tokens, hidden]
    weight: Tensor,  # [hidden]
    eps: float,
) -> Tensor:
    """x / sqrt(mean(x²) + eps) in float32, rounded to x's dtype, times weight."""
    result: Tensor = torch.ops.lamina.rms_norm.default(x, weight, eps)
    return result


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def check_norm(op: str, x: Tensor, weight: Tensor) -> None:
    """Refuse a weight that does not fit x's last dimension and dtype."""
    if weight.shape != x.shape[-1:]:
        raise ShapeError(f"{op}: weight is {list(weight.shape)}, x {list(x.shape)}; wanted x's last size")
    if weight.dtype != x.dtype:
        raise ShapeError(f"{op}: weight is {weight.dtype}; wanted x's {x.dtype}")


def _check(x: Tensor, weight: Tensor, eps: float) -> None:
    check_norm("rms_norm", x, weight)


define_op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("rms_norm", dtypes=_cuda.PROVIDER.dtypes),
        Provider(name="reference", load=lambda: reference.rms_norm),
    ),
)
