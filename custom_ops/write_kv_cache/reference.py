"""The formula of lamina::write_kv_cache."""

import torch
from torch import Tensor

from .._shared.fp8 import FP8
from .._shared.fp8_cache import to_fp8
from .int8_rows import INT8, to_int8


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """key_cache[slot // block_size, slot % block_size] = key, likewise value; slots below 0 are skipped."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    block_size = key_cache.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    for cache, rows, scale in ((key_cache, key, key_scale), (value_cache, value, value_scale)):
        if cache.dtype == FP8:  # by bytes: not every torch assigns FP8 by index
            cache.view(torch.uint8)[blocks, offsets] = to_fp8(rows[kept], scale).view(torch.uint8)
        elif cache.dtype == INT8 != rows.dtype:
            cache[blocks, offsets] = to_int8(rows[kept])
        else:
            cache[blocks, offsets] = rows[kept]
