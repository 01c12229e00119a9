"""The formula of lamina::zero_centred_rms_norm."""

from torch import Tensor

from ..precision import accumulation_dtype


def zero_centred_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (1 + weight), rounded once to x's dtype."""
    wide = x.to(accumulation_dtype(x.dtype))
    normed = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * (1.0 + weight.to(wide.dtype))).to(x.dtype)
