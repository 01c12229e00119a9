"""How a call of paged attention becomes launches of its CUDA kernels."""

import functools
from collections.abc import Callable
from typing import NamedTuple

FEW_ROWS = (8, 16)  # query rows of one key-value head that kernels 0 and 1 hold; the others take any number
MANY = len(FEW_ROWS)
HOPPER = MANY + 1  # the same as MANY by WGMMA and TMA
MIN_SPLIT_KEYS = (128, 128, 512, 512)  # of each kernel; fewer keys do not pay for merging
MAX_SPLIT_KEYS = 4096  # more keys are split even where the GPU is full, so that none lags behind
# Splits in GPUs full, with room for what each leaves: of long sequences, which some blocks share.
MOST_SPLITS, EXTRA_BLOCKS = 8, 1 / 4
NO_LIMIT = 1 << 30  # to which kernels may add as much without leaving 32 bits


class KernelShape(NamedTuple):
    """What one kernel is like on the device at hand."""

    rows: int  # query rows of one key-value head that a block holds
    blocks: int  # that the device runs at once
    partial_floats: int  # that a split leaves in the workspace


class Limits(NamedTuple):
    """How far a launch splits keys and which sequences are its own, in the order that kernels take them."""

    device_blocks: int
    num_tiles: int
    num_splits: int
    fill_splits: int
    num_extra: int  # blocks beside those of the splits that fill the device
    min_split_keys: int
    max_split_keys: int
    min_rows: int  # sequences with at most so many query rows a key-value head are left alone
    max_rows: int  # and so are those with more


class Launch(NamedTuple):
    """One launch of a kernel, and the workspace that it needs."""

    kernel: int
    limits: Limits
    num_units: int
    workspace_floats: int
    num_counters: int  # zeros before and after


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
    many: int = MANY,  # the kernel for many rows
    batch_invariant: bool = False,
) -> tuple[Launch, ...]:
    """The launches of a call; they depend on its shapes alone, so that a captured call stays right.

    With batch_invariant one kernel serves every number of rows, each from its first key to its last, since
    the others add up in other orders.
    """
    if num_tokens == 0 or num_seqs == 0:
        return ()

    def launch(kernel: int, min_rows: int, max_rows: int) -> Launch:
        shape = shape_of(kernel)
        rows = shape.rows // group * group if kernel == HOPPER else shape.rows
        tiles = num_seqs if kernel < MANY else num_tiles(num_tokens * group, rows, num_seqs)
        units = tiles * num_kv_heads
        fill, splits = (1, 1) if batch_invariant else _num_splits(shape.blocks, units, capacity, kernel)
        limits = Limits(
            device_blocks=shape.blocks,
            num_tiles=tiles,
            num_splits=splits,
            fill_splits=fill,
            num_extra=_num_extra(shape.blocks, units * fill, units * splits),
            min_split_keys=MIN_SPLIT_KEYS[kernel],
            max_split_keys=MAX_SPLIT_KEYS if kernel < MANY else NO_LIMIT,
            min_rows=min_rows,
            max_rows=max_rows,
        )
        floats = units * splits * shape.partial_floats if splits > 1 else 0
        counters = units + 1 if kernel == HOPPER else units if floats else 0
        return Launch(kernel, limits, units, floats, counters)

    if batch_invariant:
        return (launch(many, 0, NO_LIMIT),)
    few = _smallest_kernel(max_query_len * group)
    if few != MANY:
        return (launch(few, 0, NO_LIMIT),)
    few = _smallest_kernel(group)
    if few == MANY or num_seqs == 1:
        return (launch(many, 0, NO_LIMIT),)
    return launch(many, FEW_ROWS[few], NO_LIMIT), launch(few, 0, FEW_ROWS[few])


def _smallest_kernel(rows: int) -> int:
    return next((kernel for kernel, limit in enumerate(FEW_ROWS) if rows <= limit), MANY)


def num_tiles(rows: int, tile_rows: int, num_seqs: int) -> int:
    """Numbers of tiles that suffice wherever sequences begin."""
    return div_up(rows, tile_rows) if num_seqs == 1 else rows // tile_rows + num_seqs


def _num_splits(blocks: int, units: int, capacity: int, kernel: int) -> tuple[int, int]:
    """Splits that fill the device, and splits of the longest possible sequence."""
    fill = min(max(1, blocks // units), div_up(capacity, MIN_SPLIT_KEYS[kernel]))
    if kernel >= MANY:
        return fill, fill
    longest = min(div_up(capacity, MAX_SPLIT_KEYS), max(1, MOST_SPLITS * blocks // units))
    return fill, max(fill, longest)


def _num_extra(blocks: int, filling: int, most: int) -> int:
    """Blocks for splits beyond those that fill the device: as many as have room beside, or a part of it."""
    return min(most - filling, max(blocks - filling, int(blocks * EXTRA_BLOCKS), 1))


def div_up(count: int, size: int) -> int:
    """count / size, rounded up."""
    return -(-count // size)
