"""lamina::zero_centred_rms_norm, root-mean-square normalisation by weights stored as w - 1 (Gemma)."""

import torch
from torch import Tensor

from .._shared.library import define_op
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from ..rms_norm.op import check_norm
from . import _cuda, reference


def zero_centred_rms_norm(
    x: Tensor,  # [num_tokens, hidden]
    weight: Tensor,  # [hidden], 0 where a channel keeps its scale
    eps: float,
) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (1 + weight) in float32, rounded once to x's dtype."""
    result: Tensor = torch.ops.lamina.zero_centred_rms_norm.default(x, weight, eps)
    return result


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _check(x: Tensor, weight: Tensor, eps: float) -> None:
    check_norm("zero_centred_rms_norm", x, weight)


define_op(
    "zero_centred_rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("zero_centred_rms_norm", dtypes=_cuda.PROVIDER.dtypes),
        Provider(name="reference", load=lambda: reference.zero_centred_rms_norm),
    ),
)
