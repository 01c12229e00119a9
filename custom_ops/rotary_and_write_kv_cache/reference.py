"""The formula of lamina::rotary_and_write_kv_cache."""

from torch import Tensor

from ..rotary_embedding.reference import rotary_embedding
from ..write_kv_cache.reference import write_kv_cache


def rotary_and_write_kv_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """rotary_embedding, then write_kv_cache of the rotated key and the value."""
    query, key = rotary_embedding(query, key, cos, sin)
    write_kv_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    return query
