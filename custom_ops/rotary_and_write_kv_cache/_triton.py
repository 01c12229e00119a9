"""The Triton kernel of lamina::rotary_and_write_kv_cache: a program takes some heads of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.fp8 import as_bytes
from .._shared.layout import check_dense_heads, with_dense_heads
from ..rotary_embedding._triton import HEADS, rotate_heads
from ..write_kv_cache._triton import copy_heads, in_cache


@triton.jit
def rotary_and_write_kv_cache_kernel(
    query,
    query_token,
    query_head,
    key,
    key_token,
    key_head,
    value,
    value_token,
    value_head,
    cos,
    sin,
    query_out,
    key_cache,
    key_cache_block,
    key_cache_token,
    key_cache_head,
    value_cache,
    value_cache_block,
    value_cache_token,
    value_cache_head,
    slot_mapping,
    num_heads,
    num_kv_heads,
    half,
    block_size,
    key_scale,
    value_scale,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts, key_parts = tl.cdiv(num_heads, HEADS), tl.cdiv(num_kv_heads, HEADS)
    slot = tl.load(slot_mapping + token)
    cos += token * half
    sin += token * half
    # fmt: off
    if part < query_parts:
        source = query + token * query_token
        target = query_out + token * num_heads * half * 2
        first = part * HEADS
        rotate_heads(
            source, query_head, target, half * 2, cos, sin, first, num_heads, half, 1.0, HEADS, HALF)
    elif slot >= 0:
        first = (part - query_parts) % key_parts * HEADS
        if part < query_parts + key_parts:
            source = key + token * key_token
            target = in_cache(key_cache, slot, block_size, key_cache_block, key_cache_token)
            stride = key_cache_head
            rotate_heads(
                source, key_head, target, stride, cos, sin, first, num_kv_heads, half, key_scale, HEADS, HALF)
        else:
            source = value + token * value_token
            target = in_cache(value_cache, slot, block_size, value_cache_block, value_cache_token)
            stride = value_cache_head
            copy_heads(
                source, value_head, target, stride, first, num_kv_heads, half * 2, value_scale,
                HEADS, 2 * HALF)
    # fmt: on


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
    """The op, as op.py states it."""
    out = query.new_empty(query.shape)
    query, key, value = with_dense_heads(query), with_dense_heads(key), with_dense_heads(value)
    check_dense_heads("rotary_and_write_kv_cache", key_cache, value_cache)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, half = key.shape[1], head_dim // 2
    grid = (num_tokens, triton.cdiv(num_heads, HEADS) + 2 * triton.cdiv(num_kv_heads, HEADS))
    if num_tokens == 0 or half == 0 or grid[1] == 0:
        return out
    with torch.cuda.device_of(query):
        rotary_and_write_kv_cache_kernel[grid](
            *(query, *query.stride()[:2], key, *key.stride()[:2], value, *value.stride()[:2]),
            *(cos.contiguous(), sin.contiguous(), out),
            *(as_bytes(key_cache), *key_cache.stride()[:3]),
            *(as_bytes(value_cache), *value_cache.stride()[:3]),
            *(slot_mapping, num_heads, num_kv_heads, half, key_cache.shape[1], key_scale, value_scale),
            HEADS=HEADS,
            HALF=triton.next_power_of_2(half),
            num_warps=2,
            enable_fp_fusion=False,  # as in rotary_embedding
        )
    return out
