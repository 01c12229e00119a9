"""The formula of lamina::add_rms_norm."""

import torch
from torch import Tensor

from .._shared.precision import accumulation_dtype
from ..rms_norm.reference import rms_norm


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unrounded: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual rounded to x's dtype; unrounded: the norm of s before that."""
    wide = accumulation_dtype(x.dtype)
    total = x.to(wide) + residual.to(wide)
    rounded = total.to(x.dtype)
    if not unrounded:
        return rms_norm(rounded, weight, eps), rounded
    unit = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return unit.to(x.dtype) * weight, rounded
