"""The formula of lamina::write_kv_cache."""

from torch import Tensor


def write_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """key_cache[slot // block_size, slot % block_size] = key, likewise value; slots below 0 are skipped."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    block_size = key_cache.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, offsets] = key[kept]
    value_cache[blocks, offsets] = value[kept]
