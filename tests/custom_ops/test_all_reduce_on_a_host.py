"""Kernels of lamina::all_reduce and _add_rms_norm on a host: ranks run apart, and meet by flags in memory."""

import ctypes
import shutil
import struct
from collections.abc import Sequence
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
from lamina.custom_ops.all_reduce.group import sum_in_rank_order
from lamina.custom_ops.all_reduce.peers import MAX_BLOCKS as MOST_BLOCKS
from lamina.custom_ops.all_reduce.peers import MAX_RANKS, Peers, memory_bytes

from . import host_kernels

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")

MAX_BYTES, MAX_BLOCKS, EPS = 8192, 3, 1e-5
Step = tuple[
    int, bool
]  # of sums: vectors, and whether it is a two-shot; of norms: rows, and unrounded or not

sums = st.lists(st.tuples(st.integers(1, 64), st.booleans()), min_size=1, max_size=6)
norms = st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=2)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
# Of the kernel before the first: where words are about to begin anew or to be taken for negative, or are not.
epochs = st.sampled_from([0, 5, 2**31 - 3, 2**31 + 5, 2**32 - 4, 2**32 - 3, 2**32 - 1])
EPOCH_WORD = 2 * MOST_BLOCKS * MAX_RANKS  # of a rank's memory, behind the flags of two meetings


class Ranks:
    """Ranks with memory of their own, and what they are to do one after another, each in its own time."""

    def __init__(self, library: Path, size: int, epoch: int = 0) -> None:
        self._library, self.size = ctypes.CDLL(str(library)), size
        self._memory = [torch.zeros(memory_bytes(MAX_BYTES) // 4, dtype=torch.uint32) for _ in range(size)]
        for memory in self._memory:
            memory[EPOCH_WORD] = epoch
        self._calls, self._kept = bytearray(), []

    def add(self, tensors: Sequence[Sequence[Tensor]], layout: str, *fields: float) -> None:
        """A call on every rank; tensors: each of its arguments, by rank."""
        memory = tuple(one.data_ptr() for one in self._memory)
        for rank in range(self.size):
            peers = Peers(memory=memory, rank=rank, max_bytes=MAX_BYTES, max_blocks=MAX_BLOCKS)
            own = peers.fields(rank, [[ranks[rank].data_ptr()] for ranks in tensors])
            self._calls += struct.pack(f"{len(own)}q{layout}q", *own, *fields, 0)
        self._kept.append(tensors)

    def run(self, name: str, seed: int) -> bool:
        """Whether all of it ended."""
        function = getattr(self._library, name)
        function.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        error: int = function(bytes(self._calls), len(self._kept) * self.size, self.size, seed)
        assert error <= 0
        return error == 0


def drawn(size: int, *shape: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]


def poison_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.full_like(tensor, torch.nan) for tensor in tensors]


def sums_are_right(
    library: Path, steps: Sequence[Step], size: int, dtype: torch.dtype, seed: int, epoch: int = 0
) -> bool:
    """Whether all ended, and every rank has the sum of every step."""
    ranks, results = Ranks(library, size, epoch), []
    for number, (num_vecs, is_two_shot) in enumerate(steps):
        xs = drawn(size, num_vecs * 16 // dtype.itemsize, dtype=dtype, seed=number)
        results.append((xs, poison_like(xs)))
        ranks.add(results[-1], "3q", xs[0].numel(), is_two_shot, DTYPES[dtype])
    has_ended = ranks.run("run_sums", seed)
    return has_ended and all(torch.equal(out, sum_in_rank_order(xs)) for xs, outs in results for out in outs)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return host_kernels.build("all_reduce", tmp_path_factory.mktemp("host"))


@given(sums, st.integers(2, 8), dtypes, st.integers(0, 2**16), epochs)
def test_every_rank_has_every_sum_however_far_others_are_ahead(
    library: Path, steps: list[Step], size: int, dtype: torch.dtype, seed: int, epoch: int
) -> None:
    assert all(sums_are_right(library, steps, size, dtype, seed + more, epoch) for more in range(5))


@given(norms, st.sampled_from([24, 64, 520]), st.integers(2, 4), dtypes, st.integers(0, 2**16))
def test_every_rank_has_the_norm_of_the_sum(
    library: Path, steps: list[Step], hidden: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    """More rows than blocks, too, and rows that are held by one warp or by several."""
    ranks, results = Ranks(library, size), []
    (weight,) = drawn(1, hidden, dtype=dtype, seed=seed)
    for number, (rows, unrounded) in enumerate(steps):
        rows = min(rows, MAX_BYTES // (hidden * dtype.itemsize))
        xs, (residual,) = (drawn(n, rows, hidden, dtype=dtype, seed=number) for n in (size, 1))
        given = xs, [residual] * size, poison_like(xs), poison_like(xs)
        fields = weight.data_ptr(), rows, hidden, EPS, unrounded, DTYPES[dtype]
        ranks.add(given, "3qd2q", *fields)
        results.append((given, unrounded))
    assert ranks.run("run_norms", seed)
    for (xs, (residual, *_), outs, totals), unrounded in results:
        normed, total = add_rms_norm(sum_in_rank_order(xs), residual, weight, EPS, unrounded)
        for found in zip(outs, totals, strict=True):
            assert torch.equal(found[0], outs[0])
            assert torch.equal(found[1], total)
            torch.testing.assert_close(found[0], normed, **tolerance(dtype))


def tolerance(dtype: torch.dtype) -> dict[str, Any]:
    """A place more or less: the mean's sum has another order."""
    return {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}


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
    """So that the tests above can fail: with each of these some seed ends wrongly, or waits for ever."""
    sources, build = tmp_path / "csrc", tmp_path / "build"
    shutil.copytree(CSRC, sources)
    build.mkdir()
    text = (sources / header).read_text()
    assert line in text
    (sources / header).write_text(text.replace(line, fault))
    library = host_kernels.build("all_reduce", build, sources)
    many = [(60, False), (9, True), (64, False), (30, True), (61, False), (64, True)]
    assert not all(sums_are_right(library, many, 3, torch.float32, seed) for seed in range(12))
