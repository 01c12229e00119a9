"""The Triton kernel of lamina::copy_blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.fp8 import as_bytes

BLOCK = 4096


@triton.jit
def copy_blocks_kernel(
    key_cache,
    value_cache,
    key_stride,  # from block to block; their elements are neighbours
    value_stride,
    block_mapping,
    size,  # elements of a block
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    source = tl.load(block_mapping + 2 * pair).to(tl.int64)
    target = tl.load(block_mapping + 2 * pair + 1).to(tl.int64)
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < size
    keys = tl.load(key_cache + source * key_stride + elements, mask=inside)
    values = tl.load(value_cache + source * value_stride + elements, mask=inside)
    tl.store(key_cache + target * key_stride + elements, keys, mask=inside)
    tl.store(value_cache + target * value_stride + elements, values, mask=inside)


def copy_blocks(key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor) -> None:
    """The op, as op.py states it."""
    key_cache, value_cache = as_bytes(key_cache), as_bytes(value_cache)
    size = key_cache.shape[1:].numel()
    grid = (block_mapping.shape[0], triton.cdiv(size, BLOCK))
    if 0 in grid:
        return
    with torch.cuda.device_of(key_cache):
        copy_blocks_kernel[grid](
            *(key_cache, value_cache, key_cache.stride(0), value_cache.stride(0)),
            *(block_mapping.contiguous(), size),
            BLOCK=BLOCK,
        )
