"""lamina::add_zero_centred_rms_norm, the residual sum and its norm by weights stored as w - 1 (Gemma)."""

import torch
from torch import Tensor

from .._shared.library import define_op
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from ..add_rms_norm.op import check_sum_and_norm, fake_sum_and_norm
from . import _cuda, reference


def add_zero_centred_rms_norm(
    x: Tensor,  # [num_tokens, hidden]
    residual: Tensor,  # like x
    weight: Tensor,  # [hidden], 0 where a channel keeps its scale
    eps: float,
    unrounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """(zero_centred_rms_norm(s), s) with s = x + residual, rounded to x's dtype before that, or after.

    unrounded: the norm is of the sum as float32 has it; what is handed on is rounded either way.
    """
    result: tuple[Tensor, Tensor] = torch.ops.lamina.add_zero_centred_rms_norm.default(
        x, residual, weight, eps, unrounded
    )
    return result


def _check(x: Tensor, residual: Tensor, weight: Tensor, eps: float, unrounded: bool = False) -> None:
    check_sum_and_norm("add_zero_centred_rms_norm", x, residual, weight)


define_op(
    "add_zero_centred_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool unrounded=False)"
    " -> (Tensor, Tensor)",
    fake=fake_sum_and_norm,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("add_zero_centred_rms_norm", dtypes=_cuda.PROVIDER.dtypes),
        Provider(name="reference", load=lambda: reference.add_zero_centred_rms_norm),
    ),
)
