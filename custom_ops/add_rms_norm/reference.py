"""The formula of lamina::add_rms_norm."""

from torch import Tensor

from ..precision import accumulation_dtype
from ..rms_norm.reference import rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual rounded to x's dtype."""
    wide = accumulation_dtype(x.dtype)
    total = (x.to(wide) + residual.to(wide)).to(x.dtype)
    return rms_norm(total, weight, eps), total
