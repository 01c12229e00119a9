"""Slabs: the pieces in which host memory for blocks of the KV cache is taken, and what they take."""

SLAB_BYTES = 32 << 20  # host memory is taken in pieces of this size, as slots are used for the first time
MOST_DOUBLINGS, WASTED = 5, 1 / 16  # of slabs that are pinned, so that no more than so much of one is idle


def slots_of_slab(slot_bytes: int, *, is_pinned: bool) -> int:
    """How many slots are taken from the host together: what is pinned fills a power of two, near enough."""
    if not is_pinned:
        return max(1, SLAB_BYTES // slot_bytes)
    least = taken_bytes(max(SLAB_BYTES, slot_bytes), is_pinned=True)
    slabs = [least << i for i in range(MOST_DOUBLINGS)]
    full = [size for size in slabs if size % slot_bytes <= size * WASTED]
    return (full or slabs[-1:])[0] // slot_bytes


def slots_within(num_bytes: int, slot_bytes: int, *, is_pinned: bool) -> int:
    """How many slots so much host memory holds, in whole slabs and a last, smaller one."""
    count = slots_of_slab(slot_bytes, is_pinned=is_pinned)
    full, rest = divmod(num_bytes, taken_bytes(count * slot_bytes, is_pinned=is_pinned))
    if is_pinned:
        rest = taken_bytes(rest // 2 + 1, is_pinned=True) if rest else 0
    return full * count + rest // slot_bytes


def taken_bytes(num_bytes: int, *, is_pinned: bool) -> int:
    """What host memory of a size takes: torch rounds what it pins up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if is_pinned and num_bytes else num_bytes
