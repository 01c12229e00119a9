"""How calls of paged attention by fixed splits become launches: every sequence once, within the workspace."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lamina.custom_ops.paged_attention._fixed_splits import (
    DECODE,
    DECODE_ROWS,
    PREFILL,
    ROTATING_DECODE,
    SPLIT_KEYS,
    WORKSPACE_FLOATS,
    FixedLaunch,
    plan,
)
from lamina.custom_ops.paged_attention._plan import KernelShape

DECODES = DECODE, ROTATING_DECODE
H200 = {PREFILL: KernelShape(128, 132, 16640), **{kernel: KernelShape(64, 132, 130) for kernel in DECODES}}


def launches(**call: Any) -> tuple[FixedLaunch, ...]:
    return plan(H200.__getitem__, **call)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    query_lens = draw(st.lists(st.integers(1, 300), min_size=1, max_size=40))
    return {
        "group": draw(st.integers(1, 128)),
        "num_tokens": sum(query_lens),
        "num_seqs": len(query_lens),
        "num_kv_heads": draw(st.sampled_from([1, 2, 8])),
        "max_query_len": draw(st.integers(max(query_lens), 400)),
        "capacity": draw(st.integers(1, 200_000)),
        "head_dim": 128,
    }


@given(calls(), st.integers(1, 300))
def test_each_sequence_belongs_to_one_launch_that_holds_its_rows(call: dict[str, Any], length: int) -> None:
    rows = min(length, call["max_query_len"]) * call["group"]
    found = launches(**call)
    owners = [one for one in found if one.launch.limits.min_rows < rows <= one.launch.limits.max_rows]
    assert len(owners) == 1
    ((launch, fixed),) = owners
    if launch.kernel in DECODES:
        assert rows <= fixed.partial_rows <= DECODE_ROWS


@given(calls())
def test_partial_results_and_what_is_set_aside_have_room(call: dict[str, Any]) -> None:
    for launch, fixed in launches(**call):
        shape = H200[launch.kernel]
        aside = shape.blocks * shape.rows * 2 * (128 + 8) // 2  # of two threads a row, their numbers and sums
        partial = fixed.num_slots * fixed.partial_rows * (128 + 2)
        assert launch.workspace_floats == partial + aside <= WORKSPACE_FLOATS
        assert launch.num_counters == launch.num_units + 1
        assert fixed.partial_rows % 4 == 0, "whole units of 16 bytes"


@given(calls(), calls())
def test_keys_are_cut_in_the_same_places_whatever_the_call(
    call: dict[str, Any], other: dict[str, Any]
) -> None:
    assert {fixed.keys for _, fixed in launches(**call) + launches(**other)} == {SPLIT_KEYS}
    assert SPLIT_KEYS % 128 == 0


def test_a_long_sequence_is_divided_over_the_gpu_and_many_short_ones_are_not() -> None:
    shape = {"group": 4, "num_kv_heads": 8, "max_query_len": 1, "capacity": 32768, "head_dim": 128}
    ((one, fixed),) = launches(num_tokens=1, num_seqs=1, **shape, rotates=True)
    assert one.kernel == ROTATING_DECODE
    assert fixed.num_slots == 8 * 32768 // SPLIT_KEYS
    assert fixed.whole_keys < 1024
    ((_, fixed),) = launches(num_tokens=256, num_seqs=256, **shape)
    assert fixed.whole_keys >= 4096


def test_an_empty_batch_takes_no_launch() -> None:
    shape = {"group": 4, "num_kv_heads": 8, "max_query_len": 1, "capacity": 4096, "head_dim": 64}
    assert launches(num_tokens=0, num_seqs=0, **shape) == launches(num_tokens=0, num_seqs=1, **shape) == ()
