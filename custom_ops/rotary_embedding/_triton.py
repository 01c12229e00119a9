"""The Triton kernel of lamina::rotary_embedding: a program rotates some heads of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.fp8_triton import narrow
from .._shared.layout import with_dense_heads

HEADS = 8  # a program


@triton.jit
def rotate_heads(
    source,  # the token's first head; likewise target, cos and sin
    source_stride,
    target,
    target_stride,
    cos,
    sin,
    first_head,
    num_heads,
    half,
    scale,  # of a target in FP8
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    heads = first_head + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    inside = (heads < num_heads) & (columns < half)
    dtype = source.dtype.element_ty
    from_ = source + heads * source_stride + columns
    x1 = tl.load(from_, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(from_ + half, mask=inside, other=0.0).to(tl.float32)
    cosines = tl.load(cos + columns, mask=columns < half, other=0.0)
    sines = tl.load(sin + columns, mask=columns < half, other=0.0)
    to = target + heads * target_stride + columns
    tl.store(to, narrow((x1 * cosines - x2 * sines).to(dtype), scale, target), mask=inside)
    tl.store(to + half, narrow((x2 * cosines + x1 * sines).to(dtype), scale, target), mask=inside)


@triton.jit
def rotary_embedding_kernel(
    query,
    query_token,
    query_head,
    key,
    key_token,
    key_head,
    cos,
    sin,
    query_out,
    key_out,
    num_heads,
    num_kv_heads,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts = tl.cdiv(num_heads, HEADS)
    cos += token * half
    sin += token * half
    if part < query_parts:
        source = query + token * query_token
        target = query_out + token * num_heads * half * 2
        first = part * HEADS
        rotate_heads(source, query_head, target, half * 2, cos, sin, first, num_heads, half, 1.0, HEADS, HALF)
    else:
        source = key + token * key_token
        target = key_out + token * num_kv_heads * half * 2
        first = (part - query_parts) * HEADS
        rotate_heads(
            source, key_head, target, half * 2, cos, sin, first, num_kv_heads, half, 1.0, HEADS, HALF
        )


def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The op, as op.py states it."""
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    query, key = with_dense_heads(query), with_dense_heads(key)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, half = key.shape[1], head_dim // 2
    grid = (num_tokens, triton.cdiv(num_heads, HEADS) + triton.cdiv(num_kv_heads, HEADS))
    if num_tokens == 0 or half == 0 or grid[1] == 0:
        return query_out, key_out
    with torch.cuda.device_of(query):
        rotary_embedding_kernel[grid](
            *(query, *query.stride()[:2], key, *key.stride()[:2]),
            *(cos.contiguous(), sin.contiguous(), query_out, key_out),
            *(num_heads, num_kv_heads, half),
            HEADS=HEADS,
            HALF=triton.next_power_of_2(half),
            num_warps=2,
            enable_fp_fusion=False,  # multiplications and sums are rounded one by one, as the formula does it
        )
    return query_out, key_out
