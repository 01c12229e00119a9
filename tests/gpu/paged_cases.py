"""Arguments of lamina::paged_attention on a GPU amid poison, and what they should give."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.custom_ops.paged_attention import reference

from ..custom_ops.paged_case import POISON_BLOCK, PagedCase, int32

DEVICE = torch.device("cuda")
CANARY = 7.0


def make_case(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int = -1,
    chunk: int = -1,
    soft_cap: float = 0.0,
    cache_dtype: torch.dtype | None = None,  # None: of the queries
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    capacity: int = 0,
    extra_tokens: int = 0,
    seed: int = 0,
) -> PagedCase:
    """Random inputs in wider rows than needed; NaN in all that must not be read or must be written."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    starts = [0, *itertools.accumulate(query_lens)]
    used = [-(-length // block_size) for length in seq_lens]
    width = max(-(-capacity // block_size), max(used, default=0) + 2)
    order = torch.randperm(sum(used) + 1, generator=generator, device=DEVICE).int()[: sum(used)] + 1
    tables = torch.full((len(seq_lens), width), POISON_BLOCK, dtype=torch.int32, device=DEVICE)
    row_width = head_dim + (8 if cache_dtype is None else 16)  # whole units of 16 bytes
    shapes = ((sum(used) + 2, block_size, num_kv_heads + extra, row_width) for extra in (0, 1))
    wide = [_of_nan(shape, dtype) for shape in shapes]
    keys, values = (cache[:, :, :num_kv_heads, :head_dim] for cache in wide)
    for row, blocks in enumerate(order.split(used)):
        length = seq_lens[row]
        oldest = reference.oldest_visible(max(0, length - query_lens[row]), window, chunk)
        tables[row, oldest // block_size : used[row]] = blocks[oldest // block_size :]
        position = torch.arange(used[row] * block_size, device=DEVICE)
        readable = ((position >= oldest) & (position < length)).view(-1, block_size, 1, 1)
        for cache in (keys, values):
            fresh = torch.randn(used[row], *cache.shape[1:], generator=generator, device=DEVICE).to(dtype)
            cache[blocks.long()] = torch.where(readable, fresh, torch.nan)
    if cache_dtype is not None:
        keys, values = (cache.to(cache_dtype)[:, :, :num_kv_heads, :head_dim] for cache in wide)
    num_tokens = starts[-1] + extra_tokens
    query = _of_nan((num_tokens, num_heads + 1, head_dim), dtype)[:, 1:]
    query[: starts[-1]] = torch.randn(starts[-1], *query.shape[1:], generator=generator, device=DEVICE) * 2
    return PagedCase(
        out=torch.full((num_tokens, 2 * num_heads, head_dim), CANARY, dtype=dtype, device=DEVICE)[:, ::2],
        query=query,
        key_cache=keys,
        value_cache=values,
        block_tables=tables,
        seq_lens=int32(seq_lens, DEVICE),
        query_start_loc=int32(starts, DEVICE),
        max_query_len=max(query_lens, default=0),
        scale=head_dim**-0.5,
        window=window,
        chunk=chunk,
        soft_cap=soft_cap,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def _of_nan(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def exact(case: PagedCase) -> Tensor:
    """The formula in float64."""
    wide = case.to(torch.float64)
    reference.paged_attention(*wide)
    return wide.out


def naive(case: PagedCase) -> Tensor:
    """GEMM, softmax, GEMM, each rounded to the inputs' dtype."""
    case = case.widened(case.query.dtype)
    out = torch.full_like(case.out, torch.nan)
    group, starts = case.query.shape[1] // case.key_cache.shape[2], case.query_start_loc.tolist()
    for row, length in enumerate(case.seq_lens.tolist()):
        first, last = starts[row : row + 2]
        if not length or first == last:
            continue
        position = torch.arange(length - (last - first), length, device=DEVICE)[:, None]
        oldest = reference.oldest_visible(int(position[0]), case.window, case.chunk)
        start = oldest // case.key_cache.shape[1] * case.key_cache.shape[1]
        blocks = case.block_tables[row, start // case.key_cache.shape[1] :][
            : -(-length // case.key_cache.shape[1])
        ]
        blocks = blocks[blocks < POISON_BLOCK].long()
        keys, values = (
            cache[blocks]
            .flatten(0, 1)[: length - start]
            .nan_to_num(0)
            .repeat_interleave(group, 1)
            .transpose(0, 1)
            for cache in (case.key_cache, case.value_cache)
        )
        scores = (case.query[first:last].transpose(0, 1) @ keys.transpose(1, 2)) * case.scale
        if case.soft_cap > 0:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        key = torch.arange(start, length, device=DEVICE)
        visible = (key <= position) & ((key > position - case.window) | (case.window < 0))
        if case.chunk >= 0:
            visible &= key >= position - position % case.chunk
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[first:last] = (weights @ values).transpose(0, 1)
    return out
