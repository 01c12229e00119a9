"""The CUDA kernels of lamina::lora, as C++ in clusters of fibers."""

import ctypes
import struct
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lamina.custom_ops._shared.cuda_kernel import DTYPES

from . import host_kernels
from .guarded import at_the_end
from .test_lora import Operands, check, operands

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = ctypes.CDLL(str(host_kernels.build("lora", tmp_path_factory.mktemp("lora"))))
    found.run.restype = ctypes.c_char_p
    return found


class Blocks(NamedTuple):
    """Who computes it: blocks of a cluster, and tokens of a group."""

    cluster: int
    tokens: int
    chunks: int = 0  # with which the kernel of clusters alone begins; 0: that of all GPUs
    rows: int = 0  # of B, of a thread of that kernel
    is_early: bool = False  # whether that begins beside the projection


class Case(NamedTuple):
    num_tokens: int
    columns: int
    rows: tuple[int, ...]
    rank: int = 4
    is_vectors: bool = False


CASES = [
    Case(1, 8, (3,), rank=1),  # segments without a column
    Case(3, 45, (5, 2, 300), rank=3),
    Case(2, 1100, (2100, 7), rank=17),  # a part of two tiles; more rows of A than warps have at once
    Case(2, 64, (33, 8), rank=8, is_vectors=True),
    Case(12, 584, (2056, 16, 8), rank=16, is_vectors=True),
]
WAYS = [Blocks(8, 1), Blocks(8, 8), Blocks(1, 1), Blocks(1, 8)]
BY_ADAPTERS = [Blocks(8, 8, chunks, rows) for chunks, rows in ((2, 1), (2, 4), (7, 2))]
ADAPTER_CASES = [
    Case(1, 8, (3,), rank=8),  # warps without a column
    Case(34, 72, (2100, 9), rank=16),  # two windows; a part of two tiles
    Case(3, 4200, (8,), rank=24),  # chunks and ranks beyond those that are held
    Case(264, 40, (16,), rank=8),  # a cluster goes through all slots of a window
]


def run(kernel: ctypes.CDLL, given: Operands, blocks: Blocks, *, is_vectors: bool, seed: int = 0) -> Tensor:
    """What the kernel writes, by threads that go on in an order of this seed."""
    out, late_y = torch.full(given.y.shape, torch.nan, dtype=given.y.dtype), given.y.clone()
    fields: list[Any] = [
        *(given.y.data_ptr(), given.y.stride(0), given.x.data_ptr(), given.x.stride(0)),
        *(tensor.data_ptr() for tensor in (given.a, given.b, given.scales, given.slots, out)),
        *(len(given.y), len(given.a), given.x.shape[1], given.b.shape[2]),
        *(*given.rows, *[0] * (4 - len(given.rows)), DTYPES[given.y.dtype], 0, 0),
        *(is_vectors, blocks.cluster, blocks.tokens, seed, blocks.chunks, blocks.rows),
        late_y.data_ptr() if blocks.is_early else 0,
    ]
    assert kernel.run(struct.pack(f"{len(fields)}q", *fields)) == b""
    return out


def made(case: Case, dtype: torch.dtype, seed: int = 0) -> Operands:
    given = operands(case.num_tokens, case.columns, case.rows, dtype, rank=case.rank, seed=seed)
    given.slots[: case.num_tokens // 2] = 1  # neighbours with one slot
    ended = {name: at_the_end(getattr(given, name)) for name in ("a", "b", "scales")}
    x = given.x.clone() if case.is_vectors else given.x
    return Operands(*given.each(x=x, slots=at_the_end(given.slots[: case.num_tokens].clone()), **ended))


def one_token(given: Operands, token: int) -> Operands:
    own = slice(token, token + 1)
    return replace(given, y=given.y[own], x=given.x[own].clone(), slots=at_the_end(given.slots[own].clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_computes_what_the_formula_says_whoever_sums(
    kernel: ctypes.CDLL, case: Case, dtype: torch.dtype
) -> None:
    """With the same bits by clusters and single blocks, for tokens one by one and several at once."""
    given = made(case, dtype)
    found = [run(kernel, given, blocks, is_vectors=case.is_vectors) for blocks in WAYS]
    check(found[0], given)
    assert all(torch.equal(one, found[0]) for one in found[1:])


@pytest.mark.parametrize("blocks", WAYS, ids=str)
def test_threads_may_run_in_any_order(kernel: ctypes.CDLL, blocks: Blocks) -> None:
    given = made(Case(5, 40, (20, 9), rank=8, is_vectors=True), torch.bfloat16, seed=3)
    results = [run(kernel, given, blocks, is_vectors=True, seed=seed) for seed in range(4)]
    check(results[0], given)
    assert all(torch.equal(one, results[0]) for one in results[1:])


@pytest.mark.parametrize("case", ADAPTER_CASES, ids=str)
def test_it_computes_what_the_formula_says_by_adapters(kernel: ctypes.CDLL, case: Case) -> None:
    """With the same bits whatever is held, and of a token alone."""
    given = made(case._replace(is_vectors=True), torch.bfloat16)
    found = [
        run(kernel, given, blocks, is_vectors=True)
        for blocks in BY_ADAPTERS[: 3 if case.num_tokens < 99 else 1]
    ]
    check(found[0], given)
    assert all(torch.equal(one, found[0]) for one in found[1:])
    alone = one_token(given, case.num_tokens - 1)
    assert torch.equal(run(kernel, alone, BY_ADAPTERS[0], is_vectors=True)[0], found[0][-1])


@pytest.mark.parametrize("num_tokens", [9, 20])
def test_rounds_and_threads_by_adapters_may_run_in_any_order(kernel: ctypes.CDLL, num_tokens: int) -> None:
    """All tokens of one slot, so many that blocks send to each other again and again."""
    given = made(Case(num_tokens, 72, (20, 9), rank=8, is_vectors=True), torch.bfloat16, seed=3)
    given.slots.fill_(1)
    results = [run(kernel, given, BY_ADAPTERS[0], is_vectors=True, seed=seed) for seed in range(3)]
    check(results[0], given)
    assert all(torch.equal(one, results[0]) for one in results[1:])


EARLY = [Blocks(8, 8, chunks, rows, True) for chunks, rows in ((2, 1), (2, 4), (2, 8), (7, 1), (7, 2))]
EARLY_CASES = [
    Case(1, 8, (16,), rank=8),
    Case(3, 72, (2104, 8), rank=16),  # a cluster for each token
    Case(2, 4200, (8,), rank=24),
    Case(32, 40, (24, 8), rank=8),  # more than 8 tokens of a slot, and clusters of a second group
]


@pytest.mark.parametrize("case", EARLY_CASES, ids=str)
def test_beside_the_projection_it_computes_the_same_bits(kernel: ctypes.CDLL, case: Case) -> None:
    """From x alone, and y only once that is there; nothing is written before."""
    given = made(case._replace(is_vectors=True), torch.bfloat16)
    given = replace(given, y=given.y.clone(memory_format=torch.contiguous_format))
    wanted = run(kernel, given, BY_ADAPTERS[0], is_vectors=True)
    check(wanted, given)
    for seed, blocks in enumerate(EARLY):
        assert torch.equal(run(kernel, given, blocks, is_vectors=True, seed=seed), wanted), blocks
