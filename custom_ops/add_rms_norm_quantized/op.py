"""lamina::add_rms_norm_quantized, a residual sum and its norm, which is quantized in the same step."""

import torch
from torch import Tensor

from .._shared.library import define_op
from .._shared.quantized import check_format, check_rows, new_quantized
from .._shared.registry import Provider
from ..add_rms_norm.op import check_sum_and_norm
from . import _composed, _cuda, reference


def add_rms_norm_quantized(
    x: Tensor,  # [num_tokens, hidden]
    residual: Tensor,  # like x
    weight: Tensor,  # [hidden]
    eps: float,
    group: int,  # columns that share a scale: 128, in FP8 alone; 0: all of a row
    dtype: torch.dtype,  # of q: float8_e4m3fn or int8
    zero_centred: bool = False,  # by a weight stored as w - 1
    unrounded: bool = False,  # the norm reads the sum before it is rounded
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, s, sum): (q, s) = quantize_rows(n, group, dtype), n, sum = add_rms_norm(x, residual, weight, eps).

    Whatever is rounded by the two ops one after the other is rounded here: the sum, and n.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.lamina.add_rms_norm_quantized.default(
        x, residual, weight, eps, group, dtype, zero_centred, unrounded
    )
    return result


def _fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: int,
    dtype: torch.dtype,
    zero_centred: bool = False,
    unrounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return *new_quantized(x, x.shape[1], group, dtype), x.new_empty(x.shape)


def _check(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: int,
    dtype: torch.dtype,
    zero_centred: bool = False,
    unrounded: bool = False,
) -> None:
    check_rows("add_rms_norm_quantized", "x", x)
    check_sum_and_norm("add_rms_norm_quantized", x, residual, weight)
    check_format("add_rms_norm_quantized", group, dtype)


define_op(
    "add_rms_norm_quantized(Tensor x, Tensor residual, Tensor weight, float eps, int group,"
    " ScalarType dtype, bool zero_centred=False, bool unrounded=False) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        _composed.PROVIDER,
        Provider(name="reference", load=lambda: reference.add_rms_norm_quantized),
    ),
)
