"""The pool: all or nothing, counted by reference, least recently freed first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import ConfigError, OutOfBlocksError
from lamina.runtime.kv_cache.block_pool import BlockPool
from lamina.runtime.protocol.scheduler_output import NULL_BLOCK


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert NULL_BLOCK not in pool.allocate(4)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_a_failed_allocation_changes_nothing():
    pool = BlockPool(5)
    held = pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="3 KV blocks wanted, 2 of 4 are free"):
        pool.allocate(3)
    assert (pool.num_free, pool.num_used) == (2, 2)
    pool.check()
    assert pool.allocate(2) == [3, 4]  # in the order they stood in
    pool.free(held)
    assert pool.allocate(2) == held


def test_a_freed_block_is_reused_last():
    pool = BlockPool(5)
    a, b = pool.allocate(2)
    pool.free([b])
    pool.free([a])
    assert pool.allocate(4) == [3, 4, b, a]


def test_a_shared_block_is_free_when_its_last_holder_gives_it_back():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_used == 1
    pool.free(blocks)
    assert pool.num_used == 0


def test_a_block_nobody_holds_can_be_neither_freed_nor_shared():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    for misuse in (pool.free, pool.share):
        for wrong in (blocks, [NULL_BLOCK]):
            with pytest.raises(AssertionError, match="nobody holds it"):
                misuse(wrong)
    pool.check()


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks):
    with pytest.raises(ConfigError, match=f"num_blocks is {num_blocks}; wanted at least 2"):
        BlockPool(num_blocks)


operations = st.lists(
    st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 5)), max_size=40
)


@given(num_blocks=st.integers(2, 9), operations=operations)
def test_any_history_agrees_with_a_list_of_holdings(num_blocks, operations):
    pool, holdings = BlockPool(num_blocks), []
    for name, number in operations:
        if name == "allocate":
            before = pool.num_free
            try:
                holdings.append(pool.allocate(number))
                assert len(set(holdings[-1])) == number
            except OutOfBlocksError:
                assert (number > before, pool.num_free) == (True, before)
        elif holdings:
            index = number % len(holdings)
            if name == "share":
                pool.share(holdings[index])
                holdings.append(list(holdings[index]))
            else:
                pool.free(holdings.pop(index))
        pool.check()
        held = [block for holding in holdings for block in holding]
        assert pool.num_used == len(set(held))
        assert all(pool.references(block) == held.count(block) for block in range(num_blocks))
