"""Paged attention by fixed splits on Hopper: a row has the same bits in any batch, in chunks and in decode.

Each sequence's keys are cut at multiples of SPLIT_KEYS. What a split gives does not depend on who computes
it, and splits are merged from the last to the first, so a block may take a sequence whole, or each of its
splits another one. Where each sequence has one token, the kernel rotates and writes the cache, too.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._shared.cuda_kernel import CudaKernel
from .._shared.layout import with_dense_heads
from ._arguments import LAYOUT, check, check_rows, packed_launch, shapes_of, sizes_of
from ._plan import HOPPER, NO_LIMIT, KernelShape, Launch, Limits, div_up, num_tiles

ENABLED = True  # benchmarks compare it with one split
SOURCE = "fixed_splits"  # csrc/paged_attention/fixed_splits.cu: a library of its own, built where it is used
FIXED_LAYOUT = f"{LAYOUT}10qd5q"  # of struct FixedSplitArguments, without the stream
DTYPES = frozenset({torch.bfloat16, torch.float16})
NO_ROTATION = (0,) * 9, 1.0
PREFILL, DECODE, ROTATING_DECODE = HOPPER, 4, 5
SPLIT_KEYS = 512  # whole tiles of 128; of another number results have other bits
DECODE_ROWS = 64  # query rows of a key-value head that the kernels for decode take
MIXED_ROWS = 16  # and that they take beside prompts: more of them leave less room for splits
# Sequences of up to so many keys are not divided: where the GPU has room for two blocks each, and where not.
WHOLE_KEYS, WHOLE_KEYS_OF_MANY = SPLIT_KEYS, 4096
WORKSPACE_FLOATS = 1 << 22  # beyond which sequences are not divided either


class FixedSplits(NamedTuple):
    """As struct FixedSplits of the kernels has them."""

    keys: int
    whole_keys: int
    num_slots: int
    partial_rows: int


class FixedLaunch(NamedTuple):
    """A launch, and how it splits keys."""

    launch: Launch
    fixed: FixedSplits


def serves(dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether these kernels are to serve queries and a cache of these dtypes, where Hopper's does."""
    return ENABLED and dtype in DTYPES and cache_dtype == dtype


def holds(query: Tensor, key: Tensor, scale: float, soft_cap: float) -> bool:
    """Whether the kernel that rotates is to take query heads [T, num_heads, head_dim] and scores like these.

    Of more sequences than the GPU has room for two blocks each a rotation ahead of the kernel is faster.
    """
    if query.shape[1] > DECODE_ROWS * key.shape[1] or scale <= 0 or soft_cap != 0:
        return False
    return _has_room(shapes_of(query, SOURCE)(ROTATING_DECODE), query.shape[0] * key.shape[1])


@functools.cache
def find_kernel() -> CudaKernel:
    """Build or load the kernels, once."""
    return CudaKernel("paged_attention", FIXED_LAYOUT, SOURCE)


def attend(
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
) -> None:
    """lamina::paged_attention, as its op states it; for sizes that Hopper's kernel takes."""
    tensors = out, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc
    for fields in packed(tensors, max_query_len, (window, chunk), (scale, soft_cap), NO_ROTATION):
        find_kernel()(query.device, *fields)


def rotate_and_attend(
    out: Tensor,  # [num_tokens, num_heads, head_dim], written in place
    query: Tensor,  # like out
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # like key
    cos: Tensor,  # [num_tokens, head_dim / 2] float32
    sin: Tensor,  # like cos
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,  # [num_tokens] int32: the last place of the token's sequence; -1: it has no keys
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int,
    chunk: int,
    soft_cap: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write out, and the rotated keys and the values to their slots; each sequence has one token or none.

    To the bit what rotary_and_write_kv_cache and then attend give.
    """
    for fields in packed_rotating(
        *(out, query, key, value, cos, sin, key_cache, value_cache, slot_mapping),
        *(block_tables, seq_lens, query_start_loc, scale, window, chunk, soft_cap),
    ):
        find_kernel()(query.device, *fields)


def packed_rotating(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int,
    chunk: int,
    soft_cap: float,
) -> Iterator[tuple[float, ...]]:
    """The fields of struct FixedSplitArguments for each launch of a call that rotates."""
    query, key, value = with_dense_heads(query), with_dense_heads(key), with_dense_heads(value)
    cos, sin = cos.contiguous(), sin.contiguous()
    check(out, query, key_cache, value_cache, block_tables)
    check_rows(out, query, key_cache, value_cache, key=key, value=value, cos=cos, sin=sin)
    rotation = (
        *(key.data_ptr(), *key.stride()[:2]),
        *(value.data_ptr(), *value.stride()[:2]),
        *(cos.data_ptr(), sin.data_ptr(), slot_mapping.data_ptr()),
    )
    tensors = out, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc
    yield from packed(tensors, 1, (window, chunk), (scale, soft_cap), (rotation, 1.0), rotates=True)


def packed(
    tensors: tuple[Tensor, ...],  # those of the op, in its order
    max_query_len: int,
    masks: tuple[int, int],  # window, chunk
    constants: tuple[float, float],  # the scale of scores, the soft cap
    rotation: tuple[tuple[int, ...], float],
    *,
    rotates: bool = False,
) -> Iterator[tuple[float, ...]]:
    """The fields of struct FixedSplitArguments for each launch of a call, the stream left out."""
    _, query, key_cache, _, block_tables, seq_lens, _ = tensors
    sizes = sizes_of(query, key_cache, block_tables, seq_lens, max_query_len)
    addresses, key_scale = rotation
    for launch, fixed in plan(
        shapes_of(query, SOURCE), **sizes, head_dim=query.shape[2], split_keys=SPLIT_KEYS, rotates=rotates
    ):
        fields = packed_launch(launch, tensors, masks, (*constants, 1.0))
        yield (*fields, 0, *addresses, key_scale, 0, *fixed)


@functools.lru_cache(maxsize=4096)
def plan(
    shape_of: Callable[[int], KernelShape],
    *,
    group: int,
    num_tokens: int,
    num_seqs: int,
    num_kv_heads: int,
    max_query_len: int,
    capacity: int,  # keys that a sequence's row of the block table has room for
    head_dim: int,
    split_keys: int = SPLIT_KEYS,
    rotates: bool = False,
) -> tuple[FixedLaunch, ...]:
    """The launches of a call; they depend on its shapes alone, so that a captured call stays right."""
    if num_tokens == 0 or num_seqs == 0:
        return ()
    longest = max_query_len * group

    def decode(most_rows: int, max_rows: int) -> FixedLaunch:
        kernel = ROTATING_DECODE if rotates else DECODE
        units, shape = num_seqs * num_kv_heads, shape_of(kernel)
        partial_rows = div_up(most_rows, 4) * 4
        whole = WHOLE_KEYS if _has_room(shape, units) else WHOLE_KEYS_OF_MANY
        splits = div_up(capacity, split_keys) if capacity > whole else 1
        aside, of_slot = _floats_aside(shape, head_dim), partial_rows * (head_dim + 2)
        room = max(0, (WORKSPACE_FLOATS - aside) // of_slot)
        slots = min(units * splits, room) if splits > 1 else 0
        limits = _limits(shape, num_seqs, splits, 0, max_rows)
        launch = Launch(kernel, limits, units, slots * of_slot + aside, units + 1)
        return FixedLaunch(launch, FixedSplits(split_keys, whole, slots, partial_rows))

    def prefill(min_rows: int) -> FixedLaunch:
        shape = shape_of(PREFILL)
        tiles = num_tiles(num_tokens * group, shape.rows // group * group, num_seqs)
        limits, units = _limits(shape, tiles, 1, min_rows, NO_LIMIT), tiles * num_kv_heads
        launch = Launch(PREFILL, limits, units, _floats_aside(shape, head_dim), units + 1)
        return FixedLaunch(launch, FixedSplits(split_keys, NO_LIMIT, 0, 0))

    if longest <= DECODE_ROWS:
        return (decode(longest, NO_LIMIT),)
    beside = max(MIXED_ROWS, group)
    if num_seqs == 1 or beside > DECODE_ROWS:
        return (prefill(0),)
    return prefill(beside), decode(beside, beside)


def _has_room(shape: KernelShape, units: int) -> bool:
    """Whether two blocks of so many sequences' key-value heads each run at once."""
    return shape.blocks >= 2 * units


def _limits(shape: KernelShape, tiles: int, splits: int, min_rows: int, max_rows: int) -> Limits:
    return Limits(
        device_blocks=shape.blocks,
        num_tiles=tiles,
        num_splits=splits,
        fill_splits=1,
        num_extra=0,
        min_split_keys=SPLIT_KEYS,
        max_split_keys=NO_LIMIT,
        min_rows=min_rows,
        max_rows=max_rows,
    )


def _floats_aside(shape: KernelShape, head_dim: int) -> int:
    """Where each block keeps the rows of splits behind the one it is at: two threads for each of its rows."""
    return shape.blocks * 2 * shape.rows * (head_dim // 8 + 1) * 4
