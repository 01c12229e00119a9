"""Sums over ranks on one GPU: every rank is a row of one launch, and reads memory that the others have."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lamina.common.errors import KernelLaunchError, UnsupportedError
from lamina.custom_ops import add_rms_norm, all_reduce, all_reduce_add_rms_norm
from lamina.custom_ops._shared.cuda_kernel import DTYPES, CudaKernel
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.all_reduce.group import Group, MirrorGroup, group_of_thread, sum_in_rank_order
from lamina.custom_ops.all_reduce.peer_memory import PeerMemory
from lamina.custom_ops.all_reduce.peers import MAX_BYTES, PACKET_BYTES

from ..ranks import as_threads
from .one_gpu_ranks import DEVICE, OneGpuRanks, as_threads_of_one_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KB, MB = 1 << 10, 1 << 20
SMALL = [16, 8 * KB, 8 * KB + 16, 24 * KB, 64 * KB - 16, 64 * KB, 64 * KB + 16]  # about PACKET_BYTES
SIZES = [*SMALL, 72 * KB, 256 * KB, MB - 48, MB, 2 * MB + 16, 4 * MB]  # bytes
FEW_ROWS = [(1, 4096), (7, 4096), (8, 4096), (9, 4096), (5, 64), (4, 8192), (16, 1024), (1, 2816), (2, 24)]
SHAPES = [*FEW_ROWS, (300, 2048), (128, 8192), (3, 16384)]
EPS = 1e-5
SUM = functools.cache(lambda: CudaKernel("all_reduce", "33q"))
NORM = functools.cache(lambda: CudaKernel("all_reduce_add_rms_norm", "49qd2q"))
NUM_REPLAYS = 600  # of 63 sums each, for three numbers of ranks

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_size = pytest.mark.parametrize("size", [2, 3, 4, 8])


def drawn(size: int, *shape: int, dtype: torch.dtype) -> list[Tensor]:
    """A tensor of every rank, of sizes so different that the order of a sum shows."""
    return [(torch.randn(shape, device=DEVICE) * 10.0 ** (rank % 3)).to(dtype) for rank in range(size)]


def poison_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.full_like(tensor, torch.nan) for tensor in tensors]


def run_sum(ranks: OneGpuRanks, xs: Sequence[Tensor], outs: Sequence[Tensor], *, is_two_shot: bool) -> None:
    ranks.launch(SUM(), (xs, outs), xs[0].numel(), is_two_shot, DTYPES[xs[0].dtype])


def run_norm(
    ranks: OneGpuRanks, xs: Sequence[Tensor], residual: Tensor, weight: Tensor, unrounded: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The normed rows and the sums of every rank."""
    outs, totals, residuals = poison_like(xs), poison_like(xs), [residual] * len(xs)
    rest = weight.data_ptr(), xs[0].shape[0], xs[0].shape[1], EPS, unrounded, DTYPES[weight.dtype]
    ranks.launch(NORM(), (xs, residuals, outs, totals), *rest)
    return outs, totals


@every_dtype
@every_size
@pytest.mark.parametrize("is_two_shot", [False, True], ids=["one_shot", "two_shot"])
def test_every_rank_has_the_sum_in_the_order_of_ranks(
    is_two_shot: bool, size: int, dtype: torch.dtype
) -> None:
    """Small ones sent in packets and read, in turns."""
    ranks = OneGpuRanks(size)
    for number, num_bytes in enumerate([*SIZES, *SIZES[::-1], *SMALL, *SMALL]):
        ranks.peers = replace(ranks.peers, packet_bytes=0 if number % 4 == 3 else PACKET_BYTES)
        xs = drawn(size, num_bytes // dtype.itemsize, dtype=dtype)
        outs, kept = poison_like(xs), [x.clone() for x in xs]
        run_sum(ranks, xs, outs, is_two_shot=is_two_shot)
        wanted = sum_in_rank_order(xs)
        assert all(torch.equal(out, wanted) for out in outs), num_bytes
        assert all(torch.equal(*pair) for pair in zip(xs, kept, strict=True))


@every_dtype
@every_size
@pytest.mark.parametrize("unrounded", [False, True])
def test_the_norm_has_the_bits_of_both_ops(unrounded: bool, size: int, dtype: torch.dtype) -> None:
    ranks = OneGpuRanks(size)
    for number, shape in enumerate([*SHAPES, *SHAPES]):
        ranks.peers = replace(ranks.peers, packet_bytes=PACKET_BYTES if number < len(SHAPES) else 0)
        if shape[0] * shape[1] * dtype.itemsize > MAX_BYTES or shape[1] * dtype.itemsize > 32 * KB:
            continue
        xs, (residual,) = drawn(size, *shape, dtype=dtype), drawn(1, *shape, dtype=dtype)
        weight = torch.randn(shape[1], device=DEVICE).to(dtype)
        wanted = add_rms_norm(sum_in_rank_order(xs), residual, weight, EPS, unrounded)
        for found in zip(*run_norm(ranks, xs, residual, weight, unrounded), strict=True):
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), shape


def test_what_is_not_finite_is_kept_and_the_sum_is_rounded_once() -> None:
    ranks, special = OneGpuRanks(3), [torch.inf, torch.nan, -torch.inf, 65504.0, 1.0, -0.0, 0.0]
    xs = [torch.tensor([value, *special], device=DEVICE).half() for value in (1, 2**-11, 2**-11)]
    for is_two_shot in (False, True):
        outs = poison_like(xs)
        run_sum(ranks, xs, outs, is_two_shot=is_two_shot)
        for out in outs:
            torch.testing.assert_close(out, sum_in_rank_order(xs), rtol=0, atol=0, equal_nan=True)
            assert float(out[0]) == 1 + 2**-10


@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_replay_of_a_graph_reads_what_another_left(size: int) -> None:
    """More than 10^5 sums, of every size by every kernel, an odd number of them in a graph.

    So the buffers take other turns in each replay.
    """
    ranks, mismatches = OneGpuRanks(size), torch.zeros((), dtype=torch.int64, device=DEVICE)
    weight = torch.randn(4096, device=DEVICE).bfloat16()
    sites = []
    for number in range(63):
        num_bytes = SIZES[number % len(SIZES)] if number % 3 else 16 * KB * (1 + number % 7)
        xs = drawn(size, num_bytes // 2, dtype=torch.bfloat16)
        total = sum_in_rank_order(xs)
        if number % 3:
            sites.append((xs, total, None))
            continue
        xs = [x.view(-1, 4096) for x in xs]
        sites.append((xs, total.view(-1, 4096), add_rms_norm(total.view(-1, 4096), xs[0], weight, EPS)))

    def run_all() -> None:
        for number, (xs, total, normed) in enumerate(sites):
            if normed is None:
                outs = poison_like(xs)
                run_sum(ranks, xs, outs, is_two_shot=bool(number % 2))
                found = [(out, total) for out in outs]
            else:
                both = run_norm(ranks, xs, xs[0], weight, False)
                found = [(out, want) for outs, want in zip(both, normed, strict=True) for out in outs]
            for out, want in found[number % len(found) :][:2]:
                mismatches.add_((out != want).any())

    run_all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    assert int(mismatches) == 0


@pytest.mark.parametrize("size", [2, 4])
def test_ops_choose_by_size_and_have_the_groups_bits(size: int) -> None:
    """Through the ops, of ranks that are threads; what kernels do not take goes by the group."""
    shapes = [(1, 4096), (9, 4096), (512, 4096), (512, 4104), (3, 5), (0, 64)]

    def own(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        generator = torch.Generator(DEVICE).manual_seed(rank)
        return torch.randn(shape, device=DEVICE, generator=generator).to(dtype)

    def work(group: Group) -> None:
        for shape in shapes:
            for dtype in (torch.bfloat16, torch.float64):
                xs = [own(rank, shape, dtype) for rank in range(size)]
                total = sum_in_rank_order(xs)
                assert torch.equal(all_reduce(xs[group.rank], size), total)
                residual, weight = own(9, shape, dtype), own(8, shape[1:], dtype)
                found = all_reduce_add_rms_norm(xs[group.rank], residual, weight, EPS, size)
                wanted = add_rms_norm(total, residual, weight, EPS)
                assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))

    as_threads_of_one_gpu(size, work)


def test_a_kernel_that_was_asked_for_and_cannot_run_says_why() -> None:
    def call(op: str, provider: str, dtype: torch.dtype = torch.bfloat16) -> object:
        return select(op, device=DEVICE, dtype=dtype, provider=provider).call

    def work(group: Group) -> None:
        huge, odd = (torch.zeros(size, device=DEVICE).half() for size in (3 * MB, 3))
        for method in ("one_shot", "two_shot"):
            with pytest.raises(UnsupportedError, match=f"by {method}: x has 6291456 bytes; wanted at most"):
                call("all_reduce", method)(huge, 2)
            with pytest.raises(UnsupportedError, match="x has 6 bytes at address"):
                call("all_reduce", method)(odd, 2)
        row = torch.zeros(1, 20000, device=DEVICE).half()
        with pytest.raises(UnsupportedError, match="a row of x has 40000 bytes; wanted a multiple of 16"):
            call("all_reduce_add_rms_norm", "one_shot")(row, row, row[0], EPS, 2)

    as_threads_of_one_gpu(2, work)
    with group_of_thread(MirrorGroup(2)):
        x = torch.ones(8, device=DEVICE).half()
        assert torch.equal(all_reduce(x, 2), 2 * x)
        with pytest.raises(UnsupportedError, match="its ranks do not read each other's memory"):
            call("all_reduce", "one_shot")(x, 2)
    with pytest.raises(UnsupportedError, match=r"one_shot does not take torch\.float64"):
        call("all_reduce", "one_shot", torch.float64)


def test_ranks_that_do_not_fit_on_the_gpu_at_once_are_an_error_and_no_hang() -> None:
    ranks = OneGpuRanks(8)
    xs = drawn(8, 2 * MB, dtype=torch.bfloat16)
    fields = ranks.peers.fields(0, [[x.data_ptr() for x in xs]] * 2)
    fields[12] = 128  # max_blocks: of eight ranks twice as many as any GPU runs
    with pytest.raises(KernelLaunchError):
        SUM()(DEVICE, *fields, xs[0].numel(), False, DTYPES[torch.bfloat16])


def test_memory_that_one_rank_cannot_have_is_given_up_by_all() -> None:
    """Nobody waits for anybody, and each hears of the same rank."""

    def work(group: Group) -> None:
        with pytest.raises(UnsupportedError, match="rank 0: ranks share a GPU"):
            PeerMemory(group, DEVICE)

    as_threads(3, work)
