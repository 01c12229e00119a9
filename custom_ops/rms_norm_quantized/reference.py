"""The formula of lamina::rms_norm_quantized."""

import torch
from torch import Tensor

from ..quantize_rows.reference import quantize_rows
from ..rms_norm.reference import rms_norm
from ..zero_centred_rms_norm.reference import zero_centred_rms_norm


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, group: int, dtype: torch.dtype, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """quantize_rows of rms_norm, or of zero_centred_rms_norm."""
    norm = zero_centred_rms_norm if zero_centred else rms_norm
    return quantize_rows(norm(x, weight, eps), group, dtype)
