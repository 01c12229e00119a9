"""The formula of lamina::paged_attention."""

import torch
from torch import Tensor

from ..precision import accumulation_dtype


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
    soft_cap: float,
) -> None:
    """out = causal softmax(scale * query @ keys.T) @ values over each sequence's own blocks."""
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        query_len = rows.stop - rows.start
        if seq_len == 0 or query_len == 0:
            continue
        oldest = 0 if window < 0 else max(0, seq_len - query_len - window + 1)
        keys, values = (
            _gather(cache, block_tables[sequence], oldest, seq_len) for cache in (key_cache, value_cache)
        )
        out[rows] = dense_attention(query[rows], keys, values, scale, window=window, soft_cap=soft_cap)


def dense_attention(
    query: Tensor,  # [num_queries, num_heads, head_dim], the last positions of the sequence
    keys: Tensor,  # [num_keys, num_kv_heads, head_dim]
    values: Tensor,  # like keys
    scale: float,
    *,
    window: int = -1,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of one sequence without a cache, in float32 (float64 for float64), rounded once."""
    wide = accumulation_dtype(query.dtype)
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.to(wide).repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
    scores = scale * (query.to(wide).transpose(0, 1) @ keys.transpose(1, 2))  # [heads, queries, keys]
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    visible = _visible(query.shape[0], keys.shape[1], window, query.device)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    return (weights @ values).transpose(0, 1).to(query.dtype)


def _gather(cache: Tensor, block_table: Tensor, start: int, stop: int) -> Tensor:
    block_size = cache.shape[1]
    first, last = start // block_size, -(-stop // block_size)
    blocks = cache[block_table[first:last].long()].flatten(0, 1)
    return blocks[start - first * block_size : stop - first * block_size]


def _visible(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    key = torch.arange(num_keys, device=device)
    position = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    causal = key <= position
    return causal if window < 0 else causal & (key > position - window)
