"""Any history of tables leaves the right tokens in the right blocks; each way to get it wrong is noticed."""

from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from lamina.runtime.block_pool import BlockPool
from lamina.runtime.kv_cache import KVCacheManager
from lamina.runtime.prefix_cache import PrefixCache

from .tally import CACHE


class Owner:
    """A request as far as the cache knows one, with what a model has computed of it."""

    def __init__(self, request_id, tokens, cache_salt):
        self.request_id, self.tokens, self.cache_salt = request_id, tokens, cache_salt
        self.num_found = self.num_computed = 0

    def token_ids(self, start, stop):
        return self.tokens[start:stop]


TOKENS = st.sampled_from([0, 0, 0, 1])  # so that many begin alike
BLOCKS = st.sampled_from([10, 6, 14, 3, 1])
STEPS_IN_FLIGHT = 3  # the last ones, which may still fail


class KVCacheMachine(RuleBasedStateMachine):
    """Requests come, compute, share, fail and go; `slots` is what the device's memory holds."""

    @initialize(blocks=BLOCKS, block_size=st.integers(1, 3), prefix_cache=st.sampled_from([1, 1, 0]))
    def start(self, blocks, block_size, prefix_cache, window=None):
        self.cache = KVCacheManager(
            BlockPool(blocks + 1), block_size, prefix_cache=bool(prefix_cache), window=window
        )
        self.slots, self.owners, self.step, self.undo = {}, {}, 0, []
        self.num_owners = 0
        CACHE["programs" if window is None else "programs with windows"] += 1

    @rule(
        tokens=st.lists(TOKENS, min_size=1, max_size=12),
        salt=st.sampled_from(["", "", "a"]),
        spare=st.sampled_from([0, 0, 1, 2]),
        count=st.integers(0, 12),
    )
    def admit(self, tokens, salt, spare, count):
        """A request comes, and so many of its tokens are computed at once."""
        self.num_owners += 1
        owner = Owner(str(self.num_owners), tokens, salt)
        pool = self.cache.pool
        before = pool.num_free, pool.num_cached, pool.num_used
        found = self.cache.admit(owner, len(tokens), num_reusable=len(tokens) - 1, spare_blocks=spare)
        if found is None:
            assert (pool.num_free, pool.num_cached, pool.num_used) == before
            assert self.blocks(len(tokens)) + spare > pool.num_available or self.cache.prefix
            self.cache.free(owner.request_id)
            CACHE["tables refused"] += 1
            return
        CACHE.update({"tables": 1, "tokens found": found})
        assert pool.num_available >= spare
        assert found % self.cache.block_size == 0
        assert found < len(tokens), "the last token is to be computed"
        owner.num_found = owner.num_computed = found
        self.owners[owner.request_id] = owner
        self.undo.append((self.step, owner, found))
        if count:
            self.compute_of(owner, [], count)

    @rule(data=st.data(), more=st.lists(TOKENS, max_size=4), count=st.integers(1, 5))
    def compute(self, data, more, count):
        """A step of one request: it grows, writes some tokens and lets its full blocks be found."""
        owner = self.draw(data)
        if owner is not None:
            self.compute_of(owner, more, count)

    def compute_of(self, owner, more, count):
        owner_tokens = owner.tokens + more
        if not self.cache.grow(owner.request_id, len(owner_tokens)):
            return
        owner.tokens = owner_tokens
        self.step += 1
        self.undo.append((self.step, owner, owner.num_computed))
        table = self.cache.block_ids(owner.request_id)
        users = Counter(block for name in self.owners for block in self.cache.block_ids(name))
        stop = min(owner.num_computed + count, len(owner.tokens))
        for position in range(owner.num_computed, stop):
            block = table[position // self.cache.block_size]
            assert users[block] == 1, "a shared block is written"
            assert not self.cache.pool.is_kept(block), "a block that can be found is written"
            self.slots[block, position % self.cache.block_size] = owner.tokens[position]
        owner.num_computed = stop
        CACHE["steps"] += 1
        self.cache.commit(owner, stop, self.step)
        over = self.step - STEPS_IN_FLIGHT
        undone = [computed for step, other, computed in self.undo if other is owner and step > over]
        self.cache.release(owner, min(undone), over)

    @rule(data=st.data(), keep=st.booleans())
    def leave(self, data, keep):
        owner = self.draw(data)
        if owner is not None:
            if keep:
                self.cache.commit(owner, owner.num_computed, 0)
            self.drop(owner)

    @rule(count=st.integers(1, STEPS_IN_FLIGHT))
    def fail(self, count):
        """The last steps never were: what they wrote is gone, and so are those who counted on it."""
        first = self.step - count + 1
        if first < 1:
            return
        CACHE["failed steps"] += count
        for step, owner, computed in reversed(self.undo):
            if step >= first and owner.request_id in self.owners and computed < owner.num_computed:
                table = self.cache.block_ids(owner.request_id)
                for position in range(computed, owner.num_computed):
                    self.slots[table[position // self.cache.block_size], position % self.cache.block_size] = (
                        None
                    )
                owner.num_computed = max(computed, owner.num_found)
        for name in self.cache.uncommit(first):
            self.drop(self.owners[name])

    def draw(self, data):
        return self.owners[data.draw(st.sampled_from(sorted(self.owners)))] if self.owners else None

    def drop(self, owner):
        self.cache.free(owner.request_id)
        del self.owners[owner.request_id]

    def blocks(self, num_tokens):
        return -(-num_tokens // self.cache.block_size)

    @invariant()
    def everything_adds_up(self):
        if not hasattr(self, "cache"):
            return
        pool = self.cache.pool
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_usable
        self.cache.check({name: owner.num_computed for name, owner in self.owners.items()})

    @invariant()
    def every_table_holds_its_tokens(self):
        for name, owner in getattr(self, "owners", {}).items():
            table, size = self.cache.block_ids(name), self.cache.block_size
            window = self.cache.window or owner.num_computed + 1
            seen = range(max(0, owner.num_computed - window + 1), owner.num_computed)
            held = [self.slots.get((table[p // size], p % size)) for p in seen]
            assert held == [owner.tokens[p] for p in seen], f"{name} reads another's tokens"

    def teardown(self):
        for owner in [*getattr(self, "owners", {}).values()]:
            self.drop(owner)
        self.everything_adds_up()


class WindowMachine(KVCacheMachine):
    """The same where every layer sees a window alone."""

    @initialize(
        blocks=BLOCKS,
        block_size=st.integers(1, 3),
        prefix_cache=st.sampled_from([1, 1, 0]),
        window=st.integers(1, 5),
    )
    def start(self, **limits):
        super().start(**limits)


@pytest.mark.parametrize("machine", [KVCacheMachine, WindowMachine])
def test_any_history_leaves_the_right_tokens_in_every_table(machine):
    limits = settings(max_examples=10 * settings.default.max_examples, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(machine, settings=limits)


def test_so_does_any_with_one_hash_for_all():
    limits = settings(max_examples=30, stateful_step_count=40, deadline=None)
    with patch.object(PrefixCache, "digest", lambda self, contents: b"one"):
        run_state_machine_as_test(KVCacheMachine, settings=limits)


def _match_without_tokens(entry, token_ids, parent):
    return entry.parent == parent


def _match_without_parent(entry, token_ids, parent):
    return entry.token_ids == token_ids


def _find_one_too_many(self, tokens, num_reusable, find=KVCacheManager._find):
    return find(self, tokens, num_reusable + 1)


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


def _drop_without_what_follows(self, block_id):
    entry = self._by_block.pop(block_id)
    del self._by_digest[entry.digest]
    return [block_id]


def _uncommit_nothing(self, step):
    return []


def _admit_without_room(
    self, tokens, num_tokens, *, num_reusable=0, spare_blocks=0, admit=KVCacheManager.admit
):
    return admit(self, tokens, num_tokens, num_reusable=num_reusable, spare_blocks=max(0, spare_blocks - 1))


def _release_one_too_many(self, tokens, num_computed, step, release=KVCacheManager.release):
    release(self, tokens, num_computed + 1, step)


MUTANTS = {
    "the last token is found": (KVCacheManager, "_find", _find_one_too_many),
    "a block is found before it is full": (KVCacheManager, "commit", _commit_what_is_not_full),
    "kept blocks are free": (BlockPool, "free", _free_nothing_is_kept),
    "a second reference is not counted": (BlockPool, "share", _share_without_counting),
    "what follows a forgotten block stays": (PrefixCache, "drop", _drop_without_what_follows),
    "a failed step stays committed": (KVCacheManager, "uncommit", _uncommit_nothing),
    "a block is given back too soon": (KVCacheManager, "release", _release_one_too_many),
    "spare blocks are not spared": (KVCacheManager, "admit", _admit_without_room),
}


# Without windows what comes first is given back last, and is hardly ever forgotten before what follows it.
SEEN_WITH_WINDOWS = {"a block is given back too soon", "what follows a forgotten block stays"}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_way_to_get_it_wrong_is_noticed(mutant):
    with ExitStack() as stack:
        stack.enter_context(patch.dict(CACHE))  # what a mutant survives proves nothing
        stack.enter_context(patch.object(*MUTANTS[mutant]))
        limits = settings(
            max_examples=20_000,  # it ends with the first that fails
            stateful_step_count=30,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=[*HealthCheck],
        )
        with pytest.raises((AssertionError, KeyError, IndexError)):
            run_state_machine_as_test(
                WindowMachine if mutant in SEEN_WITH_WINDOWS else KVCacheMachine, settings=limits
            )


COMPARED = "lamina.runtime.prefix_cache._is"


def _find_after_one_block(tokens, salt):
    """What is found of these tokens where 0, 1 are held and every block has the same hash."""
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
