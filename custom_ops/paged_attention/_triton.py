"""The Triton kernels of lamina::paged_attention, for GPUs without nvcc.

A program takes a tile of a sequence's queries with all query heads of one key-value head, so that K and V are
read once for the group. Where the tiles are too few to fill the GPU, the keys of each are split among
several programs, and a second kernel merges what they leave.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.errors import UnsupportedError
from .._shared.fp8 import as_bytes
from .._shared.fp8_triton import widen
from .._shared.layout import check_dense_heads

LOG2_E = tl.constexpr(1.4426950408889634)
MIN_SPLIT_KEYS = 256
MAX_SPLITS = 64
INTERPRETED_PROCESSORS = 16  # for Triton's interpreter, whose tensors are on the CPU


@triton.jit
def find_tile(seq_lens, query_start_loc, num_seqs, TILE: tl.constexpr, ONE_EACH: tl.constexpr):
    """This program's sequence, its first token, query and key counts, and the tile's first query in it.

    The tiles of a sequence begin at first // TILE + its index: room for all, and at times for an empty one.
    """
    tile = tl.program_id(0)
    sequence = tile
    if not ONE_EACH:
        left, right = 0, num_seqs
        while left < right:
            middle = (left + right) // 2
            if tl.load(query_start_loc + middle) // TILE + middle <= tile:
                left = middle + 1
            else:
                right = middle
        sequence = left - 1
    first = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - first
    tile_start = 0 if ONE_EACH else (tile - first // TILE - sequence) * TILE
    return sequence, first, query_len, tl.load(seq_lens + sequence), tile_start


@triton.jit
def place_rows(first, query_len, tile_start, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Token, head, index among the sequence's queries, and validity of each row of the tile."""
    rows = tl.arange(0, ROWS)
    query_row = tile_start + rows // GROUP
    exists = (rows < ROWS // GROUP * GROUP) & (query_row < query_len)
    return (first + query_row).to(tl.int64), tl.program_id(1) * GROUP + rows % GROUP, query_row, exists


@triton.jit
def tanh(x):
    """Off by a float's last place of 1 at most, also near 0."""
    square = x * x
    small = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    power = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0, -large, large))


@triton.jit
def finite(largest):
    """What exponents are taken relative to: 0 for a row that has seen no key yet."""
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit
def oldest_visible(positions, constants, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr):
    """The first key that a query at each of these positions sees."""
    oldest = positions * 0
    if HAS_WINDOW:
        oldest = tl.maximum(oldest, positions - constants[1] + 1)
    if HAS_CHUNK:
        oldest = tl.maximum(oldest, positions - positions % constants[2])
    return oldest


@triton.jit
def attend(
    queries,  # [ROWS, DIM]
    positions,  # [ROWS]
    begin,  # the first step, and the one after the last: KEYS keys each
    end,
    oldest,  # the keys that may be read, from here to before num_keys
    num_keys,
    keys_from,  # this head's keys of slot 0, and strides of blocks and tokens; likewise values
    key_strides,
    values_from,
    value_strides,
    table,  # the sequence's row
    constants,  # scale, window, chunk, soft_cap, value_scale
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Of each row: largest score in units of log 2, sum of weights relative to it, weighted sum of values."""
    dims = tl.arange(0, DIM)
    is_dim = dims < HEAD_DIM
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    oldest_seen = oldest_visible(positions, constants, HAS_WINDOW, HAS_CHUNK)
    for step in range(begin, end):
        key = step * KEYS + tl.arange(0, KEYS)
        is_key = (key >= oldest) & (key < num_keys)
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        key_at = block * key_strides[0] + key % BLOCK_SIZE * key_strides[1]
        value_at = block * value_strides[0] + key % BLOCK_SIZE * value_strides[1]
        is_key_element = is_key[None, :] & is_dim[:, None]
        is_value_element = is_key[:, None] & is_dim[None, :]
        keys = tl.load(keys_from + key_at[None, :] + dims[:, None], mask=is_key_element, other=0.0)
        values = tl.load(values_from + value_at[:, None] + dims[None, :], mask=is_value_element, other=0.0)
        keys, values = widen(keys, queries.dtype), widen(values, queries.dtype)
        scores = tl.dot(queries, keys, input_precision="ieee") * constants[0]
        if HAS_CAP:
            scores = constants[3] * tanh(scores / constants[3])
        visible = (key[None, :] <= positions[:, None]) & (key[None, :] >= oldest_seen[:, None])
        scores = tl.where(visible, scores * LOG2_E, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        rescale = tl.exp2(largest - finite(new_largest))
        weights = tl.exp2(scores - finite(new_largest)[:, None])
        largest, total = new_largest, total * rescale + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(values.dtype), values, sums * rescale[:, None], input_precision="ieee")
    return largest, total, sums


@triton.jit
def split_steps(begin, end):
    """This program's share of the steps."""
    share = tl.cdiv(end - begin, tl.num_programs(2))
    begin += tl.program_id(2) * share
    return begin, tl.minimum(end, begin + share)


@triton.jit
def attention_kernel(
    out,
    out_strides,  # of tokens and heads
    query,
    query_strides,
    key_cache,
    key_strides,  # of blocks, tokens and heads
    value_cache,
    value_strides,
    block_tables,
    table_stride,
    seq_lens,
    query_start_loc,
    num_seqs,
    partials,  # largest, total [tiles, kv_heads, splits, ROWS] and sums [..., DIM], float32; only where SPLIT
    constants,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # the power of two that holds HEAD_DIM
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ONE_EACH: tl.constexpr,
    SPLIT: tl.constexpr,
):
    TILE: tl.constexpr = ROWS // GROUP
    sequence, first, query_len, seq_len, start = find_tile(
        seq_lens, query_start_loc, num_seqs, TILE, ONE_EACH
    )
    if (start >= query_len) | (seq_len == 0):
        return
    token, head, query_row, exists = place_rows(first, query_len, start, GROUP, ROWS)
    dims = tl.arange(0, DIM)
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]
    at = token[:, None] * query_strides[0] + head[:, None] * query_strides[1] + dims[None, :]
    queries = tl.load(query + at, mask=inside, other=0.0)
    before = seq_len - query_len  # keys older than the first query
    num_keys = tl.minimum(seq_len, before + start + TILE)
    oldest = oldest_visible(before + start, constants, HAS_WINDOW, HAS_CHUNK)
    begin, end = split_steps(oldest // KEYS, tl.cdiv(num_keys, KEYS))
    keys_from = key_cache + tl.program_id(1) * key_strides[2]
    values_from = value_cache + tl.program_id(1) * value_strides[2]
    table = block_tables + sequence.to(tl.int64) * table_stride
    # fmt: off
    largest, total, sums = attend(
        queries, before + query_row, begin, end, oldest, num_keys, keys_from, key_strides, values_from,
        value_strides, table, constants, HEAD_DIM, DIM, BLOCK_SIZE, ROWS, KEYS, HAS_WINDOW,
        HAS_CHUNK, HAS_CAP)
    # fmt: on
    if SPLIT:
        rows = partial_rows(tl.num_programs(2), tl.program_id(2), ROWS)
        tl.store(partials[0] + rows, largest)
        tl.store(partials[1] + rows, total)
        tl.store(partials[2] + rows[:, None] * DIM + dims[None, :], sums)
    else:
        store_rows(out, out_strides, token, head, sums / total[:, None] * constants[4], inside)


@triton.jit
def partial_rows(num_splits, split, ROWS: tl.constexpr):
    """Where a split of this program's tile and head lies among the partial results."""
    unit = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * num_splits + split
    return unit.to(tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def store_rows(out, out_strides, token, head, values, inside):
    dims = tl.arange(0, values.shape[1])
    at = token[:, None] * out_strides[0] + head[:, None] * out_strides[1] + dims[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def merge_kernel(
    out,
    out_strides,
    seq_lens,
    query_start_loc,
    num_seqs,
    partials,
    num_splits,
    value_scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_EACH: tl.constexpr,
):
    TILE: tl.constexpr = ROWS // GROUP
    _, first, query_len, seq_len, start = find_tile(seq_lens, query_start_loc, num_seqs, TILE, ONE_EACH)
    if (start >= query_len) | (seq_len == 0):
        return
    token, head, _, exists = place_rows(first, query_len, start, GROUP, ROWS)
    dims = tl.arange(0, DIM)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    for split in range(num_splits):
        rows = partial_rows(num_splits, split, ROWS)
        split_largest = tl.load(partials[0] + rows)
        new_largest = tl.maximum(largest, split_largest)
        kept, added = tl.exp2(largest - finite(new_largest)), tl.exp2(split_largest - finite(new_largest))
        total = total * kept + tl.load(partials[1] + rows) * added
        split_sums = tl.load(partials[2] + rows[:, None] * DIM + dims[None, :])
        sums = sums * kept[:, None] + split_sums * added[:, None]
        largest = new_largest
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]
    store_rows(out, out_strides, token, head, sums / total[:, None] * value_scale, inside)


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
    """The op, as op.py states it."""
    if batch_invariant:
        raise UnsupportedError(
            "paged_attention by triton: batch_invariant is True; it splits keys by the batch"
        )
    check_dense_heads("paged_attention", out, query, key_cache, value_cache, block_tables)
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, (block_size, num_kv_heads) = seq_lens.shape[0], key_cache.shape[1:3]
    if query.numel() == 0 or num_seqs == 0:
        return
    group, dim = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    wide = query.element_size() > 2  # float32 is multiplied without tensor cores: for proof, not for speed
    rows = min(16 if wide else 64, max(16, triton.next_power_of_2(max_query_len * group)))
    rows = max(rows, triton.next_power_of_2(group))
    one_each = max_query_len <= rows // group
    tiles = num_seqs if one_each else num_tokens // (rows // group) + num_seqs
    splits = _num_splits(query.device, tiles * num_kv_heads, block_tables.shape[1] * block_size)
    partials = _partials(query.device, (tiles, num_kv_heads, splits, rows), dim) if splits > 1 else (out,) * 3
    shape = {"HEAD_DIM": head_dim, "DIM": dim, "GROUP": group, "ROWS": rows, "ONE_EACH": one_each}
    constants = scale * key_scale, window, chunk, soft_cap, value_scale
    metadata = seq_lens, query_start_loc, num_seqs, partials
    with torch.cuda.device_of(query):
        attention_kernel[(tiles, num_kv_heads, splits)](
            *(out, out.stride()[:2], query, query.stride()[:2]),
            *(as_bytes(key_cache), key_cache.stride()[:3], as_bytes(value_cache), value_cache.stride()[:3]),
            *(block_tables, block_tables.stride(0), *metadata, constants),
            **shape,
            BLOCK_SIZE=block_size,
            KEYS=32 if wide or dim > 128 else 64,
            HAS_WINDOW=window >= 0,
            HAS_CHUNK=chunk >= 0,
            HAS_CAP=soft_cap > 0,
            SPLIT=splits > 1,
            num_stages=1 if wide else 2,
        )
        if splits > 1:
            merge_kernel[(tiles, num_kv_heads)](
                out, out.stride()[:2], *metadata, splits, value_scale, **shape
            )


def _num_splits(device: torch.device, programs: int, capacity: int) -> int:
    """Enough to give every processor two programs, by shapes alone, so that a captured call stays right."""
    wanted = 2 * _num_processors(device) // programs
    return max(1, min(wanted, triton.cdiv(capacity, MIN_SPLIT_KEYS), MAX_SPLITS))


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _partials(device: torch.device, shape: tuple[int, ...], dim: int) -> tuple[Tensor, Tensor, Tensor]:
    largest, total = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    return largest, total, torch.empty((*shape, dim), dtype=torch.float32, device=device)
