"""The Triton kernel of lamina::write_kv_cache: a program a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.fp8 import as_bytes
from .._shared.fp8_triton import narrow
from .._shared.layout import check_dense_heads, with_dense_heads


@triton.jit
def in_cache(cache, slot, block_size, block_stride, token_stride):
    """Where the heads of a slot begin."""
    return cache + (slot // block_size).to(tl.int64) * block_stride + slot % block_size * token_stride


@triton.jit
def copy_heads(
    source,  # the token's first head; likewise target
    source_stride,
    target,
    target_stride,
    first_head,
    num_heads,
    head_dim,
    scale,  # of a target in FP8
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    heads = first_head + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, DIM)[None, :]
    inside = (heads < num_heads) & (columns < head_dim)
    moved = tl.load(source + heads * source_stride + columns, mask=inside)
    tl.store(target + heads * target_stride + columns, narrow(moved, scale, target), mask=inside)


@triton.jit
def write_kv_cache_kernel(
    key,
    key_token,
    key_head,
    value,
    value_token,
    value_head,
    key_cache,
    key_cache_block,
    key_cache_token,
    key_cache_head,
    value_cache,
    value_cache_block,
    value_cache_token,
    value_cache_head,
    slot_mapping,
    num_kv_heads,
    head_dim,
    block_size,
    key_scale,
    value_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        key_to = in_cache(key_cache, slot, block_size, key_cache_block, key_cache_token)
        value_to = in_cache(value_cache, slot, block_size, value_cache_block, value_cache_token)
        keys, values = key + token * key_token, value + token * value_token
        # fmt: off
        copy_heads(keys, key_head, key_to, key_cache_head, 0, num_kv_heads, head_dim, key_scale, HEADS, DIM)
        copy_heads(
            values, value_head, value_to, value_cache_head, 0, num_kv_heads, head_dim, value_scale,
            HEADS, DIM)
        # fmt: on


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """The op, as op.py states it."""
    key, value = with_dense_heads(key), with_dense_heads(value)
    check_dense_heads("write_kv_cache", key_cache, value_cache)
    num_tokens, num_kv_heads, head_dim = key.shape
    if key.numel() == 0:
        return
    with torch.cuda.device_of(key):
        write_kv_cache_kernel[(num_tokens,)](
            *(key, *key.stride()[:2], value, *value.stride()[:2]),
            *(as_bytes(key_cache), *key_cache.stride()[:3]),
            *(as_bytes(value_cache), *value_cache.stride()[:3]),
            *(slot_mapping, num_kv_heads, head_dim, key_cache.shape[1], key_scale, value_scale),
            HEADS=triton.next_power_of_2(num_kv_heads),
            DIM=triton.next_power_of_2(head_dim),
        )
