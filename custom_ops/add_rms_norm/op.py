"""lamina::add_rms_norm, the residual sum and its normalisation in one step."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from ..library import define_op
from ..registry import Provider
from ..rms_norm.op import check_norm
from ..triton_provider import triton_provider
from . import _cuda, reference


def add_rms_norm(
    x: Tensor,  # [num_tokens, hidden]
    residual: Tensor,  # like x
    weight: Tensor,  # [hidden]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual, rounded to x's dtype before it is normalised."""
    result: tuple[Tensor, Tensor] = torch.ops.lamina.add_rms_norm.default(x, residual, weight, eps)
    return result


def _fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _check(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    check_norm("add_rms_norm", x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        got = f"residual is {list(residual.shape)} {residual.dtype}"
        raise ShapeError(f"add_rms_norm: {got}; wanted x's {list(x.shape)} {x.dtype}")


define_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("add_rms_norm", dtypes=_cuda.PROVIDER.dtypes),
        Provider(name="reference", load=lambda: reference.add_rms_norm),
    ),
)
