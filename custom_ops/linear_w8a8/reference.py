"""The formula of lamina::linear_w8a8."""

from torch import Tensor

from .._shared.quantized import group_of
from ..quantize_rows.reference import quantize_rows
from ..scaled_linear.reference import scaled_linear


def linear_w8a8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """quantize_rows, a scale a row or a group as the weights have it, then scaled_linear."""
    values, x_scale = quantize_rows(x, group_of(scale), weight.dtype)
    return scaled_linear(values, x_scale, weight, scale, bias, x.dtype)
