"""The formula of lamina::linear_fp8."""

from torch import Tensor

from .._shared.fp8 import group_of
from ..quantize_fp8.reference import quantize_fp8
from ..scaled_linear_fp8.reference import scaled_linear_fp8


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """quantize_fp8, a scale a row or a group as the weights have it, then scaled_linear_fp8."""
    values, x_scale = quantize_fp8(x, group_of(scale))
    return scaled_linear_fp8(values, x_scale, weight, scale, bias, x.dtype)
