"""Any history of tables leaves the right tokens in the right blocks; each way to get it wrong is noticed."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from lamina.runtime.kv_cache.block_pool import BlockPool
from lamina.runtime.kv_cache.manager import KVCacheManager
from lamina.runtime.kv_cache.prefix_cache import PrefixCache
from lamina.runtime.kv_cache.swap import SwapSpace

from ..cache_machines import KVCacheMachine, Owner, SwapMachine, WindowMachine
from ..tally import CACHE


@pytest.mark.parametrize("machine, factor", [(KVCacheMachine, 10), (WindowMachine, 10), (SwapMachine, 5)])
def test_any_history_leaves_the_right_tokens_in_every_table(machine, factor):
    examples = factor * settings.default.max_examples
    limits = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(machine, settings=limits)


def test_so_does_any_with_one_hash_for_all():
    limits = settings(max_examples=30, stateful_step_count=40, deadline=None)
    with patch.object(PrefixCache, "digest", lambda self, contents: b"one"):
        run_state_machine_as_test(KVCacheMachine, settings=limits)


def _match_without_tokens(entry, token_ids, parent):
    return entry.parent == parent


def _match_without_parent(entry, token_ids, parent):
    return entry.token_ids == token_ids


def _hit_one_too_many(self, tokens, num_reusable, hits=KVCacheManager._hits):
    return hits(self, tokens, num_reusable + 1)


def _commit_what_is_not_full(self, tokens, num_tokens, step, commit=KVCacheManager.commit):
    tokens.tokens = tokens.tokens + [0] * self.block_size
    commit(self, tokens, num_tokens + self.block_size - 1, step)
    tokens.tokens = tokens.tokens[: -self.block_size]


def _free_nothing_is_kept(self, block_ids):
    for block_id in block_ids:
        self._references[block_id] -= 1
        if self._references[block_id] == 0:
            self._free.append(block_id)


def _share_without_counting(self, block_ids):
    for block_id in block_ids:
        self._cached.pop(block_id, None)
        self._references[block_id] = max(1, self._references[block_id])


def _evict_without_what_follows(self, block_id):
    entry = self._by_block.pop(block_id)
    del self._by_digest[entry.digest]
    return [block_id]


def _uncommit_nothing(self, step):
    return []


def _admit_without_room(
    self, tokens, num_tokens, *, num_reusable=0, spare_blocks=0, admit=KVCacheManager.admit
):
    return admit(self, tokens, num_tokens, num_reusable=num_reusable, spare_blocks=max(0, spare_blocks - 1))


def _swap_in_another_order(self, slots, block_ids, swap_in=SwapSpace.swap_in):
    swap_in(self, slots[::-1], block_ids)


def _take_what_comes_after(self, request_id, columns, take=SwapSpace.take):
    return take(self, request_id, slice(columns.start + 1, columns.stop))


def _take_without_keeping(self, request_id, columns, take=SwapSpace.take):
    slots = take(self, request_id, columns)
    self._free += self._read_last
    self._read_last.clear()
    self._being_read.clear()
    return slots


def _undo_nothing(self, step):
    return None


def _admit_without_a_step(self, tokens, num_tokens, *, step=0, admit=KVCacheManager.admit, **more):
    return admit(self, tokens, num_tokens, **more)


def _copy_what_comes_first(self, copies, copy=KVCacheMachine.copy):
    copy(self, copies._replace(swap_out=()))
    copy(self, copies._replace(swap_in=()))


def _release_one_too_many(self, tokens, num_computed, step, release=KVCacheManager.release):
    release(self, tokens, num_computed + 1, step)


MUTANTS = {
    "the last token is a hit": (KVCacheManager, "_hits", _hit_one_too_many),
    "a block is committed before it is full": (KVCacheManager, "commit", _commit_what_is_not_full),
    "kept blocks are free": (BlockPool, "free", _free_nothing_is_kept),
    "a second reference is not counted": (BlockPool, "share", _share_without_counting),
    "what follows an evicted block stays": (PrefixCache, "evict", _evict_without_what_follows),
    "a failed step stays committed": (KVCacheManager, "uncommit", _uncommit_nothing),
    "a block is given back too soon": (KVCacheManager, "release", _release_one_too_many),
    "spare blocks are not spared": (KVCacheManager, "admit", _admit_without_room),
}


SWAP_MUTANTS = {
    "a block comes from another's slot": (SwapSpace, "swap_in", _swap_in_another_order),
    "a slot is taken that holds other tokens": (SwapSpace, "take", _take_what_comes_after),
    "a slot is free before it is read": (SwapSpace, "take", _take_without_keeping),
    "what a failed step copied out stays": (SwapSpace, "undo", _undo_nothing),
    "what a failed step copied in stays": (KVCacheManager, "admit", _admit_without_a_step),
    "what comes is copied before what leaves": (SwapMachine, "copy", _copy_what_comes_first),
}


# Without windows what comes first is given back last, and is hardly ever evicted before what follows it.
SEEN_WITH_WINDOWS = {"a block is given back too soon", "what follows an evicted block stays"}


@pytest.mark.parametrize("mutant", MUTANTS | SWAP_MUTANTS)
def test_each_way_to_get_it_wrong_is_noticed(mutant):
    with ExitStack() as stack:
        stack.enter_context(patch.dict(CACHE))  # what a mutant survives proves nothing
        stack.enter_context(patch.object(*(MUTANTS | SWAP_MUTANTS)[mutant]))
        limits = settings(
            max_examples=20_000,  # it ends with the first that fails
            stateful_step_count=30,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=[*HealthCheck],
        )
        with pytest.raises((AssertionError, KeyError, IndexError)):
            run_state_machine_as_test(_seen_by(mutant), settings=limits)


def _seen_by(mutant):
    if mutant in SWAP_MUTANTS:
        return SwapMachine
    return WindowMachine if mutant in SEEN_WITH_WINDOWS else KVCacheMachine


COMPARED = "lamina.runtime.kv_cache.prefix_cache._is"


def _find_after_one_block(tokens, salt):
    """The hits of these tokens where 0, 1 are held and every block has the same hash."""
    with patch.object(PrefixCache, "digest", lambda self, contents: b"one"):
        cache = KVCacheManager(BlockPool(9), 2, prefix_cache=True)
        cache.admit(first := Owner("first", [0, 1, 0], ""), 3)
        cache.commit(first, 2, step=1)
        return cache.admit(Owner("second", tokens, salt), len(tokens), num_reusable=len(tokens) - 1)


def test_a_hash_alone_finds_nothing():
    assert _find_after_one_block([0, 1, 1], "") == 2
    assert _find_after_one_block([0, 1, 0, 1, 1], "") == 2, "the same tokens, but not the first"
    assert _find_after_one_block([0, 1, 1], "another") == 0
    assert _find_after_one_block([1, 1, 1], "") == 0


def test_what_is_not_compared_is_noticed():
    with patch(COMPARED, _match_without_tokens):
        assert _find_after_one_block([1, 1, 1], "") == 2
    with patch(COMPARED, _match_without_parent):
        assert _find_after_one_block([0, 1, 1], "another") == 2
