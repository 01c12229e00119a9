"""The formula of lamina::copy_blocks."""

from torch import Tensor

from .._shared.fp8 import as_bytes


def copy_blocks(key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor) -> None:
    """key_cache[to] = key_cache[from] for every pair (from, to), likewise value_cache."""
    sources, targets = block_mapping.long().unbind(1)
    for cache in map(as_bytes, (key_cache, value_cache)):
        cache[targets] = cache[sources]
