"""The kernels of lamina::all_reduce on a host: ranks run apart, and meet by flags in their memory alone."""

import ctypes
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.custom_ops._shared.build import CSRC
from lamina.custom_ops._shared.cuda_kernel import DTYPES
from lamina.custom_ops.all_reduce.group import sum_in_rank_order
from lamina.custom_ops.all_reduce.peers import Peers, memory_bytes

from . import host_kernels

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")

MAX_BYTES, MAX_BLOCKS = 1024, 3
Step = tuple[int, bool]  # vectors, and whether it is a two-shot
Run = Callable[[Sequence[Step], int, torch.dtype, int], bool]

steps = st.lists(st.tuples(st.integers(1, MAX_BYTES // 16), st.booleans()), min_size=1, max_size=6)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def runner(library: Path) -> Run:
    """run(steps, ranks, dtype, seed) -> whether all ended, and every rank had the sum of every step."""
    run_ranks = ctypes.CDLL(str(library)).run_ranks
    run_ranks.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

    def run(steps: Sequence[Step], ranks: int, dtype: torch.dtype, seed: int) -> bool:
        memory = [torch.zeros(memory_bytes(MAX_BYTES) // 4) for _ in range(ranks)]
        of_rank = {"memory": tuple(one.data_ptr() for one in memory), "max_blocks": MAX_BLOCKS}
        generator, calls, results = torch.Generator().manual_seed(seed), bytearray(), []
        for num_vecs, is_two_shot in steps:
            count = num_vecs * 16 // dtype.itemsize
            xs = [torch.randn(count, generator=generator).to(dtype) for _ in range(ranks)]
            outs = [torch.full_like(x, torch.nan) for x in xs]
            for rank, pair in enumerate(zip(xs, outs, strict=True)):
                peers = Peers(rank=rank, max_bytes=MAX_BYTES, **of_rank)
                fields = peers.fields(rank, [[tensor.data_ptr()] for tensor in pair])
                calls += struct.pack("33q", *fields, count, is_two_shot, DTYPES[dtype], 0)
            results.append((xs, outs))
        error = run_ranks(bytes(calls), len(steps) * ranks, ranks, seed)
        assert error <= 0
        return error == 0 and all(_is_right(*result) for result in results)

    return run


def _is_right(xs: Sequence[Tensor], outs: Sequence[Tensor]) -> bool:
    wanted = sum_in_rank_order(xs)
    return all(torch.equal(out, wanted) for out in outs)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runner(host_kernels.build("all_reduce", tmp_path_factory.mktemp("host")))


@given(steps, st.integers(2, 8), dtypes, st.integers(0, 2**16))
def test_every_rank_has_every_sum_however_far_others_are_ahead(
    run: Run, steps: list[Step], ranks: int, dtype: torch.dtype, seed: int
) -> None:
    assert all(run(steps, ranks, dtype, seed + more) for more in range(5))


@pytest.mark.parametrize(
    "header, line, fault",
    [
        ("include/peers.cuh", "(epoch_ % 2) * ranks_.max_bytes", "0"),  # one buffer that takes no turns
        ("include/peers.cuh", "store_release(&header(other)", "if (other) store_release(&header(other)"),
        ("include/peers.cuh", "- epoch_) < 0", "- epoch_) < -1"),
        ("include/peers.cuh", "own->epoch = epoch_", "own->epoch = 1"),
        ("all_reduce/kernel.cuh", "peers.template meet<1>();", ""),
        ("all_reduce/kernel.cuh", "result<T>(rank) + i * kWidth", "result<T>(rank)"),
    ],
)
def test_a_fault_in_how_ranks_meet_is_found(header: str, line: str, fault: str, tmp_path: Path) -> None:
    """So that the test above can fail: with each of these some seed ends wrongly, or waits for ever."""
    shutil.copytree(CSRC, tmp_path / "csrc")
    source = tmp_path / "csrc" / header
    assert line in source.read_text()
    source.write_text(source.read_text().replace(line, fault))
    run = runner(host_kernels.build("all_reduce", _empty(tmp_path), tmp_path / "csrc"))
    many = [(60, False), (9, True), (64, False), (30, True), (61, False), (64, True)]
    assert not all(run(many, 3, torch.float32, seed) for seed in range(12))


def _empty(folder: Path) -> Path:
    (folder / "build").mkdir()
    return folder / "build"
