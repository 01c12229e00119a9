"""The formula of lamina::rms_norm."""

import torch
from torch import Tensor

from .._shared.precision import accumulation_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps), rounded to x's dtype, times weight."""
    wide = x.to(accumulation_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight
