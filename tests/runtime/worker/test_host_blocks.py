"""Copies between the cache and the host move whole blocks of every layer, in an order that loses none."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.protocol.scheduler_output import Copies
from lamina.runtime.worker import host_blocks, slabs
from lamina.runtime.worker.host_blocks import HostBlocks

LAYERS, BLOCKS, BLOCK = 3, 8, (4, 2, 5)  # tokens, heads, head_dim
SLOT_BYTES = 2 * LAYERS * 4 * 2 * 5 * 4


@pytest.fixture
def caches():
    torch.manual_seed(0)
    return [tuple(torch.randn(2, BLOCKS, *BLOCK)) for _ in range(LAYERS)]


def held(caches, block):
    return [cache[block].clone() for pair in caches for cache in pair]


def same(found, wanted):
    return all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("num_staged", [1, 2, 8])
@pytest.mark.parametrize("slots_per_slab", [1, 3, 64])
def test_blocks_come_back_as_they_left_and_no_other_is_touched(
    caches, monkeypatch, num_staged, slots_per_slab
):
    monkeypatch.setattr(host_blocks, "STAGED_BYTES", num_staged * SLOT_BYTES)
    monkeypatch.setattr(slabs, "SLAB_BYTES", slots_per_slab * SLOT_BYTES)
    host = HostBlocks(caches, 10)
    before = [held(caches, block) for block in range(BLOCKS)]
    host.copy(Copies(swap_out=((5, 0), (2, 4), (7, 1)), swap_in=()))
    for pair in caches:
        for cache in pair:
            cache[[2, 5, 7]] = 0.0
    host.copy(Copies(swap_out=(), swap_in=((4, 3), (1, 7), (0, 6))))
    now = [held(caches, block) for block in range(BLOCKS)]
    assert all(map(same, [now[3], now[7], now[6]], [before[2], before[7], before[5]]))
    assert all(same(now[block], before[block]) for block in (0, 1, 4))


def test_a_block_leaves_before_another_comes_into_it_and_a_slot_is_filled_before_it_is_read(caches):
    host = HostBlocks(caches, 10)
    first, second = held(caches, 1), held(caches, 2)
    host.copy(Copies(swap_out=((1, 0),), swap_in=()))
    host.copy(Copies(swap_out=((2, 1),), swap_in=((0, 2), (1, 3))))
    assert same(held(caches, 2), first)
    assert same(held(caches, 3), second)


def test_memory_is_taken_when_slots_are_used_for_the_first_time(caches, monkeypatch):
    monkeypatch.setattr(slabs, "SLAB_BYTES", 2 * SLOT_BYTES)
    host = HostBlocks(caches, 10)
    assert (host.slot_bytes, host.num_bytes) == (SLOT_BYTES, 0)
    host.copy(Copies(swap_out=((1, 0), (2, 1)), swap_in=()))
    assert host.num_bytes == 2 * SLOT_BYTES
    host.copy(Copies(swap_out=((1, 9),), swap_in=()))
    assert host.num_bytes == 4 * SLOT_BYTES
    few = HostBlocks(caches, 1)
    few.copy(Copies(swap_out=((1, 0),), swap_in=()))
    assert few.num_bytes == SLOT_BYTES


@given(slot=st.integers(1, 200 << 20), slots=st.integers(1, 5000), extra=st.integers(0, 1 << 20))
def test_pinned_memory_which_comes_in_powers_of_two_is_never_more_than_was_allowed(slot, slots, extra):
    given_bytes = slot * slots + extra
    per_slab = slabs.slots_of_slab(slot, is_pinned=True)
    count = slabs.slots_within(given_bytes, slot, is_pinned=True)
    full, rest = divmod(count, per_slab)
    taken = full * slabs.taken_bytes(per_slab * slot, is_pinned=True)
    taken += slabs.taken_bytes(rest * slot, is_pinned=True)
    assert taken <= given_bytes
    if full:
        assert per_slab * slot >= 0.75 * slabs.taken_bytes(per_slab * slot, is_pinned=True)


def test_slots_of_20_mib_fill_what_is_pinned_for_them():
    slot = 20 << 20  # of a model of 70B in bfloat16
    per_slab = slabs.slots_of_slab(slot, is_pinned=True)
    assert slabs.taken_bytes(per_slab * slot, is_pinned=True) <= per_slab * slot * 16 / 15
    assert slabs.slots_within(8 << 30, slot, is_pinned=True) * slot >= 0.93 * (8 << 30)
    assert slabs.slots_within(8 << 30, slot, is_pinned=False) == (8 << 30) // slot
