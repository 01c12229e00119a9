"""Block tables: long enough for their tokens, no longer, and never half grown."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import ConfigError
from lamina.runtime.kv_cache.block_pool import BlockPool
from lamina.runtime.kv_cache.manager import KVCacheManager


@dataclass
class Owner:
    """What a table is made for."""

    request_id: str
    tokens: tuple[int, ...] = ()
    cache_salt: str = ""

    def token_bytes(self, start, stop):
        return bytes(4 * (stop - start))


def manager(blocks, block_size=4):
    return KVCacheManager(BlockPool(blocks + 1), block_size)


def begin(cache, name, num_tokens, **how):
    return cache.admit(Owner(name), num_tokens, **how)


def test_a_table_grows_by_a_block_only_when_the_last_one_is_full():
    cache = manager(4)
    begin(cache, "a", 0)
    lengths = []
    for num_tokens in range(1, 10):
        assert cache.grow("a", num_tokens)
        lengths.append(len(cache.block_ids("a")))
    assert lengths == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_a_table_only_grows_at_its_end():
    cache = manager(4)
    begin(cache, "a", 5)
    before = cache.block_ids("a")
    cache.grow("a", 8)
    assert cache.block_ids("a") == before
    cache.grow("a", 9)
    assert cache.block_ids("a") == before + cache.block_ids("a", 2)
    assert cache.num_blocks("a") == 3
    assert cache.num_blocks("never seen") == 0


def test_growth_that_does_not_fit_changes_nothing():
    cache = manager(4)
    assert begin(cache, "a", 8) == 0
    before = cache.block_ids("a")
    assert not cache.grow("a", 17)
    assert begin(cache, "b", 9) is None
    assert (cache.block_ids("a"), cache.pool.num_free) == (before, 2)
    cache.check({"a": 8})


def test_freeing_twice_or_freeing_nothing_is_harmless():
    cache = manager(4)
    begin(cache, "a", 8)
    for name in ("a", "a", "never seen"):
        cache.free(name)
    assert cache.pool.num_free == 4
    cache.check({})


def test_the_end_of_a_freed_table_is_reused_before_its_beginning():
    cache = manager(3)
    begin(cache, "a", 12)
    first, second, third = cache.block_ids("a")
    cache.free("a")
    begin(cache, "b", 12)
    assert cache.block_ids("b") == (third, second, first)


def test_fitting_counts_the_blocks_to_spare():
    for num_tokens, spare, fits in ((16, 0, True), (17, 0, False), (12, 1, True), (13, 1, False)):
        assert (begin(manager(4), "a", num_tokens, spare_blocks=spare) is not None) == fits


def test_the_capacity_leaves_out_the_null_block():
    assert manager(8).capacity_tokens == 32


def test_a_block_size_below_one_is_refused():
    with pytest.raises(ConfigError, match="block_size is 0; wanted at least 1"):
        manager(4, block_size=0)


@pytest.mark.parametrize("lengths", [{}, {"a": 9}, {"a": 8, "b": 1}])
def test_the_check_finds_tables_that_do_not_match_their_requests(lengths):
    cache = manager(4)
    begin(cache, "a", 8)
    with pytest.raises(AssertionError):
        cache.check(lengths)


def test_the_check_finds_a_block_held_outside_every_table():
    cache = manager(4)
    begin(cache, "a", 8)
    cache.pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks in tables, 3 used"):
        cache.check({"a": 8})


events = st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(1, 20)), max_size=40)


@given(blocks=st.integers(1, 8), block_size=st.integers(1, 5), events=events)
def test_any_history_keeps_tables_exact(blocks, block_size, events):
    cache, lengths = manager(blocks, block_size), {}
    for name, num_tokens in events:
        if num_tokens is None:
            cache.free(name)
            lengths.pop(name, None)
        else:
            room = cache.pool.num_free * block_size
            held = -(-lengths.get(name, 0) // block_size) * block_size
            known = name in lengths
            grown = cache.grow(name, num_tokens) if known else begin(cache, name, num_tokens) is not None
            assert grown == (num_tokens <= held + room)
            if num_tokens <= held + room:
                lengths[name] = max(num_tokens, lengths.get(name, 0))
        cache.check(lengths)
        assert all(len(cache.block_ids(name)) == -(-length // block_size) for name, length in lengths.items())
