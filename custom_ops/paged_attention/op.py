"""lamina::paged_attention, causal attention of a mixed batch over a paged key-value cache."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op, no_result
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from ..write_kv_cache.int8_rows import cache_width
from ..write_kv_cache.stored import check_stored
from . import _cpu, _cuda, _flash_attn, reference


def paged_attention(
    out: Tensor,  # like query, written in place
    query: Tensor,  # [num_tokens, num_heads, head_dim], last dimension contiguous
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]; in int8 head_dim + 4
    value_cache: Tensor,  # like key_cache
    block_tables: Tensor,  # [num_seqs, max_blocks] int32, only the blocks in use are read
    seq_lens: Tensor,  # [num_seqs] int32, what is in the cache, this step's tokens included; 0: a padding row
    query_start_loc: Tensor,  # [num_seqs + 1] int32, where each sequence's queries start
    max_query_len: int,
    scale: float,
    window: int,  # each query sees its last `window` positions, itself included; -1: all
    chunk: int,  # each query sees the positions of its own `chunk` of the sequence alone; -1: all
    soft_cap: float,  # scores become soft_cap * tanh(scores / soft_cap); 0: they stay
    key_scale: float = 1.0,  # what keys of a cache in float8_e4m3fn are multiplied by
    value_scale: float = 1.0,
    batch_invariant: bool = False,
) -> None:
    """out = causal softmax(scale * query @ keys.T) @ values over each sequence's own blocks.

    Query j of a sequence sits at position seq_len - query_len + j, so decode, chunked prefill and full
    prefill are one case. Rows of padding, and rows beyond query_start_loc[-1], keep what was in `out`.
    Keys and values may be float8_e4m3fn, or on a CPU int8 as write_kv_cache stores them: queries keep their
    dtype, and sums are as exact as without, but that queries of 16 bits beside int8 are rounded to 16 bits of
    their largest.
    With batch_invariant the bits of a row depend on its own sequence up to its position alone: on no
    neighbour, and on no chunk that a prompt came in.
    """
    torch.ops.lamina.paged_attention.default(
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        max_query_len,
        scale,
        window,
        chunk,
        soft_cap,
        key_scale,
        value_scale,
        batch_invariant,
    )


def _check(
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
    shape, cache_shape = query.shape, key_cache.shape
    fits = out.shape == shape and len(shape) == 3 and len(cache_shape) == 4
    if not fits or cache_shape[3] != cache_width(shape[2], key_cache.dtype):
        got = f"out is {list(out.shape)}, query {list(shape)}, key_cache {list(cache_shape)}"
        wanted = "[T, heads, D] twice and [blocks, block_size, kv_heads, D], D + 4 in int8"
        raise ShapeError(f"paged_attention: {got}; wanted {wanted}")
    if value_cache.shape != cache_shape or shape[1] % cache_shape[2]:
        got = f"value_cache is {list(value_cache.shape)}, key_cache {list(cache_shape)}, heads {shape[1]}"
        raise ShapeError(f"paged_attention: {got}; wanted equal caches and heads a multiple of kv_heads")
    caches, scales = (key_cache, value_cache), (key_scale, value_scale)
    check_stored("paged_attention", (out.dtype, query.dtype), caches, scales)
    if any(limit == 0 or limit < -1 for limit in (window, chunk)) or soft_cap < 0:
        got = f"window is {window}, chunk {chunk}, soft_cap {soft_cap}"
        raise ShapeError(f"paged_attention: {got}; wanted window and chunk -1 or >= 1, a soft_cap >= 0")
    _check_metadata(block_tables, seq_lens, query_start_loc)


def _check_metadata(block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> None:
    if not block_tables.dtype == seq_lens.dtype == query_start_loc.dtype == torch.int32:
        got = ", ".join(str(x.dtype) for x in (block_tables, seq_lens, query_start_loc))
        raise ShapeError(f"paged_attention: block_tables, seq_lens, query_start_loc are {got}; wanted int32")
    tables, lens, starts = block_tables.shape, seq_lens.shape, query_start_loc.shape
    if len(tables) != 2 or lens != tables[:1] or starts != (tables[0] + 1,):
        got = f"block_tables is {list(tables)}, seq_lens {list(lens)}, query_start_loc {list(starts)}"
        raise ShapeError(f"paged_attention: {got}; wanted [S, max_blocks], [S] and [S + 1]")
    if not (seq_lens.is_contiguous() and query_start_loc.is_contiguous()):
        raise ShapeError("paged_attention: wanted seq_lens and query_start_loc contiguous")


define_op(
    "paged_attention(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables,"
    " Tensor seq_lens, Tensor query_start_loc, int max_query_len, float scale, int window, int chunk,"
    " float soft_cap, float key_scale=1.0, float value_scale=1.0,"
    " bool batch_invariant=False) -> ()",
    fake=no_result,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("paged_attention", dtypes=_cuda.PROVIDER.dtypes),
        _flash_attn.PROVIDER,
        _cpu.PROVIDER,
        Provider(name="reference", load=lambda: reference.paged_attention),
    ),
)
