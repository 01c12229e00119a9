"""The formula of lamina::add_zero_centred_rms_norm."""

from torch import Tensor

from .._shared.precision import accumulation_dtype
from ..zero_centred_rms_norm.reference import weighted_unit


def add_zero_centred_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unrounded: bool = False
) -> tuple[Tensor, Tensor]:
    """(zero_centred_rms_norm(s), s) with s = x + residual rounded; unrounded: of s before that."""
    wide = accumulation_dtype(x.dtype)
    total = x.to(wide) + residual.to(wide)
    rounded = total.to(x.dtype)
    return weighted_unit(total if unrounded else rounded.to(wide), weight, eps).to(x.dtype), rounded
