"""The formula of lamina::add_rms_norm_fp8."""

from torch import Tensor

from ..add_rms_norm.reference import add_rms_norm
from ..add_zero_centred_rms_norm.reference import add_zero_centred_rms_norm
from ..quantize_fp8.reference import quantize_fp8


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: int,
    zero_centred: bool = False,
    unrounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_fp8 of add_rms_norm's norm, or of add_zero_centred_rms_norm's, and its sum."""
    norm = add_zero_centred_rms_norm if zero_centred else add_rms_norm
    normed, total = norm(x, residual, weight, eps, unrounded)
    return *quantize_fp8(normed, group), total
