"""The formula of lamina::rms_norm_fp8."""

from torch import Tensor

from ..quantize_fp8.reference import quantize_fp8
from ..rms_norm.reference import rms_norm
from ..zero_centred_rms_norm.reference import zero_centred_rms_norm


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, group: int, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """quantize_fp8 of rms_norm, or of zero_centred_rms_norm."""
    norm = zero_centred_rms_norm if zero_centred else rms_norm
    return quantize_fp8(norm(x, weight, eps), group)
