"""The Triton kernel of lamina::qk_norm: a program takes some heads of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.layout import with_dense_heads

HEADS = 8  # a program


@triton.jit
def norm_heads(
    source,  # the token's first head; likewise target
    source_stride,
    target,
    weight,
    first_head,
    num_heads,
    head_dim,
    eps,
    ZERO_CENTRED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    heads = first_head + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (heads < num_heads) & (columns < head_dim)
    dtype = target.dtype.element_ty
    values = tl.load(source + heads * source_stride + columns, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask=columns < head_dim, other=0.0).to(tl.float32)
    units = values * tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / head_dim + eps)
    if ZERO_CENTRED:
        weights += 1.0
    else:
        units = units.to(dtype).to(tl.float32)  # rounded before it meets the weight
    tl.store(target + heads * head_dim + columns, (units * weights).to(dtype), mask=inside)


@triton.jit
def qk_norm_kernel(
    query,
    query_token,
    query_head,
    key,
    key_token,
    key_head,
    query_weight,
    key_weight,
    query_out,
    key_out,
    num_heads,
    num_kv_heads,
    head_dim,
    eps,
    ZERO_CENTRED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts = tl.cdiv(num_heads, HEADS)
    if part < query_parts:
        source = query + token * query_token
        target = query_out + token * num_heads * head_dim
        first = part * HEADS
        norm_heads(
            *(source, query_head, target, query_weight, first, num_heads, head_dim, eps),
            *(ZERO_CENTRED, HEADS, BLOCK),
        )
    else:
        source = key + token * key_token
        target = key_out + token * num_kv_heads * head_dim
        first = (part - query_parts) * HEADS
        norm_heads(
            *(source, key_head, target, key_weight, first, num_kv_heads, head_dim, eps),
            *(ZERO_CENTRED, HEADS, BLOCK),
        )


def qk_norm(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    """The op, as op.py states it."""
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    query, key = with_dense_heads(query), with_dense_heads(key)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grid = (num_tokens, triton.cdiv(num_heads, HEADS) + triton.cdiv(num_kv_heads, HEADS))
    if num_tokens == 0 or head_dim == 0 or grid[1] == 0:
        return query_out, key_out
    with torch.cuda.device_of(query):
        qk_norm_kernel[grid](
            *(query, *query.stride()[:2], key, *key.stride()[:2]),
            *(query_weight.contiguous(), key_weight.contiguous(), query_out, key_out),
            *(num_heads, num_kv_heads, head_dim, eps),
            ZERO_CENTRED=zero_centred,
            HEADS=HEADS,
            BLOCK=triton.next_power_of_2(head_dim),
            num_warps=2,
        )
    return query_out, key_out
