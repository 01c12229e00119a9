"""The formula of lamina::qk_norm."""

from torch import Tensor

from ..rms_norm.reference import rms_norm
from ..zero_centred_rms_norm.reference import zero_centred_rms_norm


def qk_norm(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    """rms_norm, or zero_centred_rms_norm, of every head of query and of key."""
    norm = zero_centred_rms_norm if zero_centred else rms_norm
    return norm(query, query_weight, eps), norm(key, key_weight, eps)
