"""The formula of lamina::paged_attention."""

import torch
from torch import Tensor

from .._shared.fp8 import FP8
from .._shared.precision import accumulation_dtype
from ..write_kv_cache.int8_rows import INT8, from_int8


def paged_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
    chunk: int,
    soft_cap: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    batch_invariant: bool = False,
) -> None:
    """out = causal softmax(scale * query @ keys.T) @ values over each sequence's own blocks."""
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[sequence : sequence + 2]
        if seq_len == 0 or first == last:
            continue
        step = (
            1 if batch_invariant else last - first
        )  # the library sums as it likes, but a row alone always alike
        for row in range(first, last, step):
            rows, end = slice(row, row + step), seq_len - (last - row - step)
            oldest = oldest_visible(end - step, window, chunk)
            keys, values = (
                _gather(cache, block_tables[sequence], oldest, end, query.dtype, stored_scale)
                for cache, stored_scale in ((key_cache, key_scale), (value_cache, value_scale))
            )
            limits = {"window": window, "chunk": chunk}
            out[rows] = dense_attention(
                query[rows], keys, values, scale, **limits, soft_cap=soft_cap, first=oldest
            )


def oldest_visible(position: int, window: int, chunk: int) -> int:
    """The first position that a query at this one sees, and so all that a sequence's later queries see."""
    return max(0, position - window + 1 if window >= 0 else 0, position // chunk * chunk if chunk >= 0 else 0)


def dense_attention(
    query: Tensor,  # [num_queries, num_heads, head_dim], the last positions of the sequence
    keys: Tensor,  # [num_keys, num_kv_heads, head_dim]
    values: Tensor,  # like keys
    scale: float,
    *,
    window: int = -1,
    chunk: int = -1,
    soft_cap: float = 0.0,
    first: int = 0,  # the position of the first key
) -> Tensor:
    """Causal attention of one sequence without a cache, in float32 (float64 for float64), rounded once."""
    wide = accumulation_dtype(query.dtype)
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.to(wide).repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
    scores = scale * (query.to(wide).transpose(0, 1) @ keys.transpose(1, 2))  # [heads, queries, keys]
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    key = torch.arange(first, first + keys.shape[1], device=query.device)
    visible = _visible(key, key[len(key) - len(query) :, None], window, chunk)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    return (weights @ values).transpose(0, 1).to(query.dtype)


def _gather(
    cache: Tensor, block_table: Tensor, start: int, stop: int, dtype: torch.dtype, stored_scale: float
) -> Tensor:
    """Rows of a sequence as numbers: of a cache in fewer bits in the dtype that sums are taken in."""
    block_size = cache.shape[1]
    first, last = start // block_size, -(-stop // block_size)
    blocks = cache[block_table[first:last].long()].flatten(0, 1)
    rows = blocks[start - first * block_size : stop - first * block_size]
    if cache.dtype == INT8:
        return from_int8(rows, accumulation_dtype(dtype))
    return rows.to(accumulation_dtype(dtype)) * stored_scale if cache.dtype == FP8 else rows


def _visible(key: Tensor, position: Tensor, window: int, chunk: int) -> Tensor:
    visible = key <= position
    if window >= 0:
        visible &= key > position - window
    if chunk >= 0:
        visible &= key // chunk == position // chunk
    return visible
