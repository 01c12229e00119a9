"""The formula of lamina::zero_centred_rms_norm."""

from torch import Tensor

from .._shared.precision import accumulation_dtype


def zero_centred_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (1 + weight), rounded once to x's dtype."""
    return weighted_unit(x.to(accumulation_dtype(x.dtype)), weight, eps).to(x.dtype)


def weighted_unit(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same of an x that is wide already, before it is rounded."""
    normed = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return normed * (1.0 + weight.to(wide.dtype))
