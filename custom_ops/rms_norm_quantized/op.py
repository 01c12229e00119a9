"""lamina::rms_norm_quantized, a norm whose result is quantized in the same step."""

import torch
from torch import Tensor

from .._shared.library import define_op
from .._shared.quantized import check_format, check_rows, new_quantized
from .._shared.registry import Provider
from ..rms_norm.op import check_norm
from . import _composed, _cuda, reference


def rms_norm_quantized(
    x: Tensor,  # [num_tokens, hidden]
    weight: Tensor,  # [hidden]
    eps: float,
    group: int,  # columns that share a scale: 128, in FP8 alone; 0: all of a row
    dtype: torch.dtype,  # of q: float8_e4m3fn or int8
    zero_centred: bool = False,  # by a weight stored as w - 1
) -> tuple[Tensor, Tensor]:
    """quantize_rows(n, group, dtype) with n = rms_norm(x, weight, eps), rounded to x's dtype before that."""
    result: tuple[Tensor, Tensor] = torch.ops.lamina.rms_norm_quantized.default(
        x, weight, eps, group, dtype, zero_centred
    )
    return result


def _fake(
    x: Tensor, weight: Tensor, eps: float, group: int, dtype: torch.dtype, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    return new_quantized(x, x.shape[1], group, dtype)


def _check(
    x: Tensor, weight: Tensor, eps: float, group: int, dtype: torch.dtype, zero_centred: bool = False
) -> None:
    check_rows("rms_norm_quantized", "x", x)
    check_norm("rms_norm_quantized", x, weight)
    check_format("rms_norm_quantized", group, dtype)


define_op(
    "rms_norm_quantized(Tensor x, Tensor weight, float eps, int group, ScalarType dtype,"
    " bool zero_centred=False) -> (Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        _composed.PROVIDER,
        Provider(name="reference", load=lambda: reference.rms_norm_quantized),
    ),
)
