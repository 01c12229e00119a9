"""How calls of paged attention become launches: every sequence once, and splits that hold as lengths grow."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lamina.custom_ops.paged_attention._plan import (
    FEW_ROWS,
    HOPPER,
    MANY,
    MAX_SPLIT_KEYS,
    KernelShape,
    plan,
)

H100 = {
    0: KernelShape(8, 396, 1040),
    1: KernelShape(16, 396, 2080),
    MANY: KernelShape(96, 264, 12480),
    HOPPER: KernelShape(128, 132, 16640),
}
CALL = {
    "group": 4,
    "num_tokens": 1,
    "num_seqs": 1,
    "num_kv_heads": 8,
    "max_query_len": 1,
    "capacity": 32768,
}


def launches(**call: Any) -> Any:
    return plan(H100.__getitem__, **CALL | call)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """A batch with its longest query, of any size."""
    query_lens = draw(st.lists(st.integers(1, 300), min_size=1, max_size=40))
    return {
        "group": draw(st.integers(1, 20)),
        "num_tokens": sum(query_lens),
        "num_seqs": len(query_lens),
        "num_kv_heads": draw(st.sampled_from([1, 2, 8])),
        "max_query_len": draw(st.integers(max(query_lens), 400)),
        "capacity": draw(st.integers(1, 200_000)),
        "many": draw(st.sampled_from([MANY, HOPPER])),
    }


@given(calls(), st.integers(1, 300))
def test_each_sequence_belongs_to_one_launch(call: dict[str, Any], query_len: int) -> None:
    rows = min(query_len, call["max_query_len"]) * call["group"]
    owners = [each for each in launches(**call) if each.limits.min_rows < rows <= each.limits.max_rows]
    assert len(owners) == 1
    assert owners[0].kernel == call["many"] or rows <= FEW_ROWS[owners[0].kernel]


@given(calls(), st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_every_row_has_a_tile(call: dict[str, Any], query_lens: list[int]) -> None:
    group = call["group"]
    call |= {"num_tokens": sum(query_lens), "num_seqs": len(query_lens), "max_query_len": max(query_lens)}
    for launch in launches(**call):
        if launch.kernel >= MANY:
            rows = H100[launch.kernel].rows
            rows = rows // group * group if launch.kernel == HOPPER else rows
            first = [sum(query_lens[:seq]) * group // rows + seq for seq in range(len(query_lens) + 1)]
            tiles = [-(-length * group // rows) for length in query_lens]
            ends = [start + count for start, count in zip(first, tiles, strict=False)]
            assert all(end <= after for end, after in zip(ends, first[1:], strict=True))
            assert ends[-1] <= launch.limits.num_tiles


@given(calls())
def test_a_launch_has_room_for_all_its_tiles_and_partial_results(call: dict[str, Any]) -> None:
    for launch in launches(**call):
        shape, limits = H100[launch.kernel], launch.limits
        assert launch.num_units == limits.num_tiles * call["num_kv_heads"]
        if launch.kernel < MANY:
            assert limits.num_tiles == call["num_seqs"]
        wanted = launch.num_units * limits.num_splits * shape.partial_floats
        assert launch.workspace_floats == (wanted if limits.num_splits > 1 else 0)
        hopper = launch.kernel == HOPPER  # counts the units that were taken as well
        assert launch.num_counters == launch.num_units * (limits.num_splits > 1 or hopper) + hopper
        assert 1 <= limits.fill_splits <= limits.num_splits
        beyond = launch.num_units * (limits.num_splits - limits.fill_splits)
        assert min(beyond, 1) <= limits.num_extra <= min(beyond, shape.blocks)


def test_one_sequence_is_split_over_the_whole_gpu() -> None:
    (launch,) = launches()
    assert launch.limits.fill_splits * 8 == 392


def test_many_sequences_are_split_only_for_the_longest_among_them() -> None:
    (launch,) = launches(num_seqs=64, num_tokens=64)
    assert launch.limits.fill_splits == 1
    assert launch.limits.num_splits == min(32768 // MAX_SPLIT_KEYS, 8 * 396 // 512)


def test_splits_of_long_sequences_are_shared_by_a_part_of_the_gpu() -> None:
    """Most of these blocks have nothing to do where no sequence is long: all of them are there at once."""
    for num_seqs in (32, 49, 128, 256):
        (launch,) = launches(num_seqs=num_seqs, num_tokens=num_seqs, capacity=131_072)
        assert launch.limits.num_extra <= max(396 - 8 * num_seqs, 396 // 4)


def test_a_short_capacity_is_not_split() -> None:
    (launch,) = launches(capacity=128)
    assert (launch.limits.num_splits, launch.workspace_floats) == (1, 0)


def test_a_mixed_batch_takes_two_launches_and_one_prompt_takes_one() -> None:
    mixed = launches(num_seqs=9, num_tokens=520, max_query_len=512)
    assert [launch.kernel for launch in mixed] == [MANY, 0]
    assert [launch.kernel for launch in launches(num_tokens=512, max_query_len=512)] == [MANY]


def test_an_empty_batch_takes_no_launch() -> None:
    assert launches(num_seqs=0, num_tokens=0) == launches(num_tokens=0) == ()


@given(calls())
def test_kernels_count_keys_and_rows_within_32_bits(call: dict[str, Any]) -> None:
    """They round up: a number of keys plus a limit, less one."""
    for launch in launches(**call):
        limits = launch.limits
        largest = max(limits.min_split_keys, limits.max_split_keys, limits.max_rows)
        assert largest + call["capacity"] - 1 < 2**31
        assert limits.max_split_keys >= min(call["capacity"], MAX_SPLIT_KEYS)


@given(calls(), calls())
def test_one_kernel_serves_every_batch_that_is_to_leave_no_trace(
    call: dict[str, Any], other: dict[str, Any]
) -> None:
    """Whole sequences, whatever the sizes: what is split depends on them."""
    many = call["many"]
    for each in (call, {**other, "many": many}):
        (launch,) = launches(**each, batch_invariant=True)
        assert (launch.kernel, launch.limits.num_splits) == (many, 1)
        assert (launch.limits.min_rows, launch.workspace_floats) == (0, 0)
