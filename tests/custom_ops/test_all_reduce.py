"""lamina::all_reduce, and the groups of ranks that it sums over."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.common.errors import GroupError, ShapeError, UnsupportedError
from lamina.custom_ops import all_reduce
from lamina.custom_ops._shared import registry
from lamina.custom_ops.all_reduce.cuda_group import gather, sum_by_shares
from lamina.custom_ops.all_reduce.gloo_group import GlooGroup
from lamina.custom_ops.all_reduce.group import Group, current_group, group_of_thread, rank_0_first
from lamina.custom_ops.all_reduce.peers import (
    MAX_BYTES,
    MAX_RANKS,
    ONE_SHOT_BYTES,
    Peers,
    method_for,
    obstacle,
)
from lamina.custom_ops.all_reduce.thread_group import ThreadGroup

from ..ranks import as_processes, as_threads

PROVIDERS = [name for name in registry.providers("all_reduce") if registry.runs_on("all_reduce", name, "cpu")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(0, 8), (1, 1), (5, 64), (3, 2, 7)]


def own(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (rank % 3)).to(dtype)


def wanted(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(shape, dtype=wide)
    for rank in range(size):
        total = total + own(rank, shape, dtype).to(wide)
    return total.to(dtype)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_has_the_sum_in_the_order_of_ranks(size: int, provider: str) -> None:
    def work(group: Group) -> list[Tensor]:
        call = registry.select(
            "all_reduce", device=torch.device("cpu"), dtype=torch.float32, provider=provider
        ).call
        return [call(own(group.rank, shape, dtype), size) for shape in SHAPES for dtype in DTYPES]

    expected = [wanted(size, shape, dtype) for shape in SHAPES for dtype in DTYPES]
    for sums in as_threads(size, work):
        for got, want in zip(sums, expected, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


def test_the_sum_is_rounded_once() -> None:
    """In bfloat16 1 + 2^-8 is 1, so that a sum rounded at each rank would lose both small ones."""
    parts = [torch.tensor([1.0]), torch.tensor([2.0**-8]), torch.tensor([2.0**-8])]
    sums = as_threads(3, lambda group: all_reduce(parts[group.rank].bfloat16(), 3))
    assert [float(one) for one in sums] == [1.0 + 2.0**-7] * 3


def test_the_argument_stays_and_the_result_is_memory_of_its_own() -> None:
    def work(group: Group) -> None:
        x = torch.full((4, 6), float(group.rank + 1)).T  # not contiguous
        result = all_reduce(x, group.size)
        result.zero_()
        assert torch.equal(x, torch.full((6, 4), float(group.rank + 1)))
        x.zero_()  # at once: no other rank reads it any more
        assert torch.equal(all_reduce(torch.ones(2), group.size), torch.full((2,), float(group.size)))

    as_threads(4, work)
    as_threads(1, work)


def test_what_is_not_finite_is_kept() -> None:
    x = torch.tensor([float("inf"), float("nan"), 1.0, float("-inf")])
    for total in as_threads(2, lambda group: all_reduce(x, 2)):
        assert torch.equal(total.nan_to_num(7.0, 8.0, 9.0), (x + x).nan_to_num(7.0, 8.0, 9.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_an_op_to_torch(dtype: torch.dtype) -> None:
    torch.library.opcheck(torch.ops.lamina.all_reduce.default, (torch.randn(5, 8).to(dtype), 1))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"all_reduce: x is \[2\] torch.int64; wanted a floating dtype"):
        all_reduce(torch.zeros(2, dtype=torch.int64), 1)
    with pytest.raises(ShapeError, match="world_size is 0; wanted 1 or more"):
        all_reduce(torch.zeros(2), 0)
    with pytest.raises(GroupError, match="world_size is 2; wanted 1, as this process is rank 0"):
        all_reduce(torch.zeros(2), 2)


def test_a_thread_is_of_its_group_while_it_says_so() -> None:
    before, (first, second) = current_group(), ThreadGroup(2).ranks
    with group_of_thread(first):
        with group_of_thread(second):
            assert current_group() is second
        assert current_group() is first
        seen: list[Group] = []
        thread = threading.Thread(target=lambda: seen.append(current_group()))
        thread.start()
        thread.join()
        assert seen == [before]
    assert current_group() is before
    assert before.size == 1


def test_parts_of_all_ranks_lie_side_by_side_and_one_speaks_for_all() -> None:
    def work(group: Group) -> tuple[list[list[float]], Any]:
        group.barrier()
        gathered = group.all_gather(torch.full((2, 1), float(group.rank)), dim=1)
        return gathered.tolist(), group.broadcast_object({"from": group.rank}, src=group.size - 1)

    for size in (1, 3):
        columns = [float(rank) for rank in range(size)]
        assert as_threads(size, work) == [([columns, columns], {"from": size - 1})] * size


def test_ranks_that_wait_for_one_that_failed_are_let_go() -> None:
    def work(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("of rank 1")
        group.barrier()

    with pytest.raises((KeyError, GroupError), match=r"of rank 1"):
        as_threads(3, work)
    first, _ = ThreadGroup(2, timeout=0.05).ranks
    with pytest.raises(GroupError, match="failed, or is late"):
        first.barrier()


def peers_of(size: int) -> Peers:
    return Peers(memory=tuple(range(size)), rank=0, max_blocks=8)


@pytest.mark.parametrize("size", range(2, MAX_RANKS + 1))
def test_a_sum_of_more_ranks_is_shared_out_from_a_smaller_size_on(size: int) -> None:
    def method(num_bytes: int) -> str | None:
        return method_for(peers_of(size), torch.empty(num_bytes // 2, dtype=torch.bfloat16))

    bound = ONE_SHOT_BYTES[size]
    assert bound <= ONE_SHOT_BYTES.get(size - 1, MAX_BYTES)
    assert method(16) == method(bound) == "one_shot"
    assert method(bound + 16) == ("two_shot" if bound < MAX_BYTES else None)
    assert method(MAX_BYTES + 16) is None


def test_kernels_leave_to_the_group_what_they_cannot_sum() -> None:
    some = torch.empty(64, dtype=torch.bfloat16)
    assert obstacle(peers_of(2), some) is None
    for peers, x, why in [
        (None, some, "do not read each other's memory"),
        (peers_of(2), some.double(), "x is torch.float64; wanted torch.float32"),
        (peers_of(2), some[:9], "x has 18 bytes at address"),
        (peers_of(2), some[1:9], "wanted multiples of 16"),
        (
            peers_of(2),
            torch.empty(MAX_BYTES + 16, dtype=torch.int8).view(torch.half),
            "wanted at most 4194304",
        ),
    ]:
        assert why in str(obstacle(peers, x))
        assert method_for(peers, x) is None


def test_rank_0_goes_first_and_the_others_after() -> None:
    order: list[int] = []

    def work(group: Group) -> None:
        with rank_0_first() as is_first:
            order.append(group.rank)
            assert is_first == (len(order) == 1) == (group.rank == 0)

    as_threads(4, work)
    assert sorted(order[1:]) == [1, 2, 3]
    with rank_0_first() as is_first:
        assert is_first, "who is alone is the first"


def test_processes_that_talk_over_gloo_agree_in_every_bit_and_miss_one_that_ends(tmp_path: Path) -> None:
    answers = as_processes(3, _in_a_process, tmp_path)
    for sums, said, unsaid, _ in answers:
        assert said == ({"blocks": [1, 2.5, "x", None]}, "x" * 100_000, [2, "of rank 2"])
        assert "wanted what JSON can say" in unsaid
        for got, (shape, dtype) in zip(sums, ((s, d) for s in SHAPES for d in DTYPES), strict=True):
            assert got == wanted(3, shape, dtype).double().tolist()
    assert answers[0][-1] == "gone"
    for rank in (1, 2):
        assert f"rank {rank} of 3 heard no more of another" in answers[rank][-1]


def _in_a_process(group: Group) -> tuple[list[Any], tuple[Any, ...], str, str]:
    sums = [all_reduce(own(group.rank, s, d), 3).double().tolist() for s in SHAPES for d in DTYPES]
    group.barrier()
    columns = [float(rank) for rank in range(3)]
    assert group.all_gather(torch.full((2, 1), float(group.rank)), 1).tolist() == [columns, columns]
    assert gather(torch.full((2, 1), float(group.rank)), 1, 3, None).tolist() == [columns, columns]
    shares = [sum_by_shares(own(group.rank, s, d), 3, None) for s in SHAPES for d in DTYPES]
    assert [share.double().tolist() for share in shares] == sums
    said = (
        group.broadcast_object({"blocks": (1, 2.5, "x", None)}),
        group.broadcast_object("x" * 100_000 if group.rank == 0 else None),
        group.broadcast_object([group.rank, f"of rank {group.rank}"], src=2),
    )
    unsaid = _error_of(lambda: group.broadcast_object({1, 2}))
    if group.rank == 0:
        group.close()
        return sums, said, unsaid, "gone"
    return sums, said, unsaid, _error_of(lambda: all_reduce(torch.ones(3), 3))


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (GroupError, UnsupportedError) as error:
        return str(error)
    return "no error"


def test_a_rank_whose_others_never_come_is_an_error_and_no_hang(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match="rank 0 of 2 found no others at"):
        GlooGroup(f"file://{tmp_path}/alone", rank=0, size=2, timeout=0.2)
