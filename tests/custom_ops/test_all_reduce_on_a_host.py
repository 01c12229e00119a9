"""Kernels of lamina::all_reduce and _add_rms_norm on a host: ranks run apart, and meet in memory alone."""

import ctypes
import re
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.custom_ops._shared.build import CSRC
from lamina.custom_ops._shared.cuda_kernel import DTYPES
from lamina.custom_ops.add_rms_norm.reference import add_rms_norm
from lamina.custom_ops.all_reduce import peers
from lamina.custom_ops.all_reduce.group import sum_in_rank_order
from lamina.custom_ops.all_reduce.peers import MAX_RANKS, Peers, memory_bytes

from . import host_kernels

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")

MAX_BYTES, MAX_BLOCKS, EPS = 16640, 3, 1e-5
EPOCH_WORD = 2 * peers.MAX_BLOCKS * MAX_RANKS  # of a rank's memory, behind the flags of two meetings


@dataclass(frozen=True)
class Sum:
    """A sum of some vectors of 16 bytes, in one shot or two."""

    num_vecs: int
    is_two_shot: bool

    def add(self, ranks: "Ranks", number: int) -> "Outcome":
        """The call on every rank; number: which of several it is."""
        xs = drawn(ranks.size, self.num_vecs * 16 // ranks.dtype.itemsize, dtype=ranks.dtype, seed=number)
        outs = poison_like(xs)
        ranks.add("add_sum", "3q", (xs, outs), xs[0].numel(), self.is_two_shot, DTYPES[ranks.dtype])
        return Outcome(sums=outs, wanted_sum=sum_in_rank_order(xs))


@dataclass(frozen=True)
class Norm:
    """The norm of a sum of rows, added to a residual."""

    rows: int
    hidden: int
    unrounded: bool

    def add(self, ranks: "Ranks", number: int) -> "Outcome":
        """The call on every rank; number: which of several it is."""
        dtype, rows = ranks.dtype, min(self.rows, MAX_BYTES // (self.hidden * ranks.dtype.itemsize))
        xs, (residual,) = (drawn(n, rows, self.hidden, dtype=dtype, seed=number) for n in (ranks.size, 1))
        (weight,) = drawn(1, self.hidden, dtype=dtype, seed=number)
        outs, totals = poison_like(xs), poison_like(xs)
        fields = weight.data_ptr(), rows, self.hidden, EPS, self.unrounded, DTYPES[dtype]
        ranks.add("add_norm", "3qd2q", (xs, [residual] * ranks.size, outs, totals), *fields, kept=weight)
        normed, total = add_rms_norm(sum_in_rank_order(xs), residual, weight, EPS, self.unrounded)
        return Outcome(sums=totals, wanted_sum=total, normed=outs, wanted_normed=normed)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a call leaves on every rank, and what is wanted there."""

    sums: list[Tensor]
    wanted_sum: Tensor
    normed: Sequence[Tensor] = ()
    wanted_normed: Tensor | None = None

    def is_right(self) -> bool:
        """Whether the sums have all bits, and the norms the same ones everywhere."""
        if not all(torch.equal(total, self.wanted_sum) for total in self.sums):
            return False
        return all(
            torch.equal(out, self.normed[0])
            and torch.allclose(out, self.wanted_normed, **tolerance(out.dtype))
            for out in self.normed
        )


def tolerance(dtype: torch.dtype) -> dict[str, Any]:
    """A place more or less: the mean's sum has another order."""
    return {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Ranks and how they are to run."""

    size: int
    dtype: torch.dtype = torch.float32
    seed: int
    epoch: int = 0  # of the kernel before the first
    packet_bytes: int = 256


class Ranks:
    """Ranks with memory of their own, and what they are to do one after another, each in its own time."""

    def __init__(self, library: Path, case: Case) -> None:
        self._library, self._case = ctypes.CDLL(str(library)), case
        self.size, self.dtype = case.size, case.dtype
        self._memory = [
            torch.zeros(memory_bytes(MAX_BYTES) // 4, dtype=torch.uint32) for _ in range(case.size)
        ]
        for memory in self._memory:
            memory[EPOCH_WORD] = case.epoch
        self._kept: list[Any] = []
        self._library.begin(ctypes.c_int64(case.size))

    def add(
        self, name: str, layout: str, tensors: Sequence[Sequence[Tensor]], *fields: float, kept: Any = None
    ) -> None:
        """A call on every rank; tensors: each of its arguments, by rank; kept: what else it reads."""
        memory = tuple(one.data_ptr() for one in self._memory)
        for rank in range(self.size):
            packet_bytes = self._case.packet_bytes
            limits = {"max_bytes": MAX_BYTES, "max_blocks": MAX_BLOCKS, "packet_bytes": packet_bytes}
            own = Peers(memory=memory, rank=rank, **limits).fields(
                rank, [[ranks[rank].data_ptr()] for ranks in tensors]
            )
            call = struct.pack(f"{len(own)}q{layout}q", *own, *fields, 0)
            assert getattr(self._library, name)(call) == 0
        self._kept += [tensors, kept]

    def run(self) -> bool:
        """Whether all of it ended."""
        ended: int = self._library.run(ctypes.c_uint(self._case.seed))
        return ended == 1


def drawn(size: int, *shape: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]


def poison_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.full_like(tensor, torch.nan) for tensor in tensors]


def outcomes(library: Path, steps: Sequence[Sum | Norm], case: Case) -> list[Outcome]:
    """Of every step, or nothing where not all of them end."""
    ranks = Ranks(library, case)
    found = [step.add(ranks, number) for number, step in enumerate(steps)]
    return found if ranks.run() else []


def are_right(library: Path, steps: Sequence[Sum | Norm], case: Case) -> bool:
    """Whether all ended, and every rank has what it must have of every step."""
    found = outcomes(library, steps, case)
    return bool(found) and all(outcome.is_right() for outcome in found)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return host_kernels.build("all_reduce", tmp_path_factory.mktemp("host"))


def test_both_sides_lay_out_memory_alike() -> None:
    found = dict(re.findall(r"\b(k\w+) = (\d+)\b", (CSRC / "include" / "peers.cuh").read_text()))
    wanted = {
        "kMaxRanks": MAX_RANKS,
        "kMaxPeerBlocks": peers.MAX_BLOCKS,
        "kHeaderBytes": peers.HEADER_BYTES,
        "kPacketBytes": peers.PACKET_BYTES,
    }
    assert {name: int(found[name]) for name in wanted} == wanted


# Of 16 to 1,024 bytes, some of which are sent in packets and some are not, whatever a case sends so.
sums = st.builds(Sum, st.integers(1, 64), st.booleans())
small_sums = st.builds(Sum, st.integers(1, 24), st.just(value=False))
norms = st.builds(Norm, st.integers(1, 7), st.sampled_from([24, 64]), st.booleans())
widths = st.sampled_from([24, 64, 520, 1032, 2064, 4112])
wide_norms = st.builds(Norm, st.integers(1, 7), widths, st.booleans())
cases = st.builds(
    Case,
    size=st.integers(2, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
    # Where words are about to begin anew or to be taken for negative, or are not.
    epoch=st.sampled_from([0, 5, 2**31 - 3, 2**31 + 5, 2**32 - 4, 2**32 - 3, 2**32 - 1]),
    packet_bytes=st.sampled_from([0, 128, 256, 512, 1024, 65536]),
)


@given(st.lists(sums | small_sums, min_size=1, max_size=6), cases)
def test_every_rank_has_every_sum_however_far_others_are_ahead(
    library: Path, steps: list[Sum], case: Case
) -> None:
    assert all(are_right(library, steps, replace(case, seed=case.seed + more)) for more in range(5))


@given(st.lists(sums | small_sums | norms, min_size=2, max_size=8), cases)
def test_kernels_of_all_kinds_follow_each_other_in_any_order(
    library: Path, steps: list[Sum | Norm], case: Case
) -> None:
    assert are_right(library, steps, case)


@given(st.lists(wide_norms, min_size=1, max_size=2), cases)
def test_every_rank_has_the_norm_of_the_sum(library: Path, steps: list[Norm], case: Case) -> None:
    """More rows than blocks, too, and rows held by one warp or by several, with up to 4 vectors a thread."""
    assert are_right(library, steps, replace(case, size=min(case.size, 5)))


@given(st.lists(wide_norms, min_size=1, max_size=2), cases)
def test_packets_bring_the_bits_that_are_read_otherwise(library: Path, steps: list[Norm], case: Case) -> None:
    few = replace(case, size=min(case.size, 5))
    ways = [outcomes(library, steps, replace(few, packet_bytes=limit)) for limit in (0, 65536)]
    for read, sent in zip(*ways, strict=True):
        assert all(torch.equal(*pair) for pair in zip(read.normed, sent.normed, strict=True))
        assert all(torch.equal(*pair) for pair in zip(read.sums, sent.sums, strict=True))


READS = [Sum(60, False), Sum(9, True), Sum(64, False), Sum(30, True), Sum(61, False), Sum(64, True)]
SENDS = [Sum(16, False), Norm(2, 24, False), Sum(16, False), Sum(15, False), Sum(40, True), Norm(1, 24, True)]


def is_found(library: Path, case: Case) -> bool:
    """Whether some seed ends wrongly, or waits for ever."""
    seeds = [replace(case, seed=seed) for seed in range(32)]
    steps = SENDS * 2 if case.packet_bytes else READS
    return not all(are_right(library, steps, one) for one in seeds)


@pytest.mark.long
@pytest.mark.parametrize(
    "header, line, fault",
    [
        ("include/peers.cuh", "(epoch_ % 2) * ranks_.max_bytes", "0"),  # one buffer that takes no turns
        ("include/peers.cuh", "store_release(&header(other)", "if (other) store_release(&header(other)"),
        ("include/peers.cuh", "flag == epoch_ ||", "flag == epoch_ - 1 || flag == epoch_ ||"),
        ("include/peers.cuh", "|| flag == epoch_after(epoch_)", ""),
        ("include/peers.cuh", "own->epoch = epoch_", "own->epoch = 1"),
        ("all_reduce/kernel.cuh", "peers.template meet<1>();", ""),
        ("all_reduce/kernel.cuh", "result<T>(rank) + i * kWidth", "result<T>(rank)"),
    ],
)
def test_a_fault_in_how_ranks_meet_is_found(header: str, line: str, fault: str, tmp_path: Path) -> None:
    """So that the tests above can fail."""
    assert is_found(library_with(header, line, fault, tmp_path), Case(size=3, seed=0, packet_bytes=0))


@pytest.mark.long
@pytest.mark.parametrize(
    "header, line, fault, epoch",
    [
        # of any epoch, of one that took the same turn, of half an epoch, or of new memory
        ("include/peer_packets.cuh", "while (differences != 0)", "while (false)", 0),
        ("include/peer_packets.cuh", "while (differences != 0)", "while (differences % 2 != 0)", 0),
        ("include/peer_packets.cuh", "| (second ^ epoch)", "", 0),
        ("include/peers.cuh", "epoch == UINT32_MAX ? 2 : epoch + 1", "epoch + 1", 2**32 - 1),
        # turns that are none, or that do not alternate
        ("include/peers.cuh", "(epoch_ % 2 * kMaxRanks + from)", "from", 0),
        ("include/peers.cuh", "epoch == UINT32_MAX ? 2", "epoch == UINT32_MAX ? 1", 2**32 - 3),
        # epochs that are not counted, or counted while some have still to ask for them
        ("all_reduce/kernel.cuh", "peers.leave();", "", 0),
        ("all_reduce_add_rms_norm/kernel.cuh", "peers.leave();", "", 0),
        (
            "include/peers.cuh",
            "__syncthreads();\n    if (threadIdx.x != blockDim.x - 1)",
            "if (threadIdx.x != 0)",
            0,
        ),
        ("include/peers.cuh", "gridDim.x == 1 || atomicInc", "gridDim.x <= 2 || atomicInc", 0),
    ],
)
def test_a_fault_in_what_ranks_send_is_found(
    header: str, line: str, fault: str, epoch: int, tmp_path: Path
) -> None:
    """So that the tests above can fail."""
    assert is_found(library_with(header, line, fault, tmp_path), Case(size=3, seed=0, epoch=epoch))


@pytest.mark.long
def test_without_a_fault_none_is_found(library: Path) -> None:
    for case in (Case(size=3, seed=0), Case(size=3, seed=0, packet_bytes=0)):
        assert not any(is_found(library, replace(case, epoch=epoch)) for epoch in (0, 2**32 - 3, 2**32 - 1))


def library_with(header: str, line: str, fault: str, folder: Path) -> Path:
    """The kernels with a fault in place of what is right."""
    sources, build = folder / "csrc", folder / "build"
    shutil.copytree(CSRC, sources)
    build.mkdir()
    text = (sources / header).read_text()
    assert line in text
    (sources / header).write_text(text.replace(line, fault))
    return host_kernels.build("all_reduce", build, sources)
