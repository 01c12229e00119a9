"""The formula of lamina::add_rms_norm_quantized."""

import torch
from torch import Tensor

from ..add_rms_norm.reference import add_rms_norm
from ..add_zero_centred_rms_norm.reference import add_zero_centred_rms_norm
from ..quantize_rows.reference import quantize_rows


def add_rms_norm_quantized(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: int,
    dtype: torch.dtype,
    zero_centred: bool = False,
    unrounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_rows of add_rms_norm's norm, or of add_zero_centred_rms_norm's, and its sum."""
    norm = add_zero_centred_rms_norm if zero_centred else add_rms_norm
    normed, total = norm(x, residual, weight, eps, unrounded)
    return *quantize_rows(normed, group, dtype), total
