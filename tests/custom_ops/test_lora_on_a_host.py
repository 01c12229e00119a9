"""The CUDA kernels of lamina::lora, alone and with what is joined with it, as C++ in clusters of fibers."""

import ctypes
import struct
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lamina.custom_ops import add_rms_norm
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


EPS = 1e-5
PLAIN, GATED, NORMED = range(3)  # as host_cuda/lora.cpp has them


@dataclass(frozen=True)
class Normed:
    """What a residual sum and its norm are given, and where the sum is written."""

    residual: Tensor
    weight: Tensor
    total: Tensor


def run(
    kernel: ctypes.CDLL,
    given: Operands,
    blocks: Blocks,
    *,
    is_vectors: bool,
    seed: int = 0,
    is_gated: bool = False,
    normed: Normed | None = None,
) -> Tensor:
    """What the kernel writes, by threads that go on in an order of this seed."""
    width = given.y.shape[1] // (1 + is_gated)
    out = torch.full((len(given.y), width), torch.nan, dtype=given.y.dtype)
    end = GATED if is_gated else PLAIN if normed is None else NORMED
    tensors = (normed.residual, normed.weight, normed.total) if normed else ()
    row = normed.residual.stride(0) if normed else 0
    fields: list[Any] = [
        *([tensor.data_ptr() for tensor in tensors] or [0, 0, 0]),
        *(row, EPS),
        *(given.y.data_ptr(), given.y.stride(0), given.x.data_ptr(), given.x.stride(0)),
        *(tensor.data_ptr() for tensor in (given.a, given.b, given.scales, given.slots, out)),
        *(len(given.y), len(given.a), given.x.shape[1], given.b.shape[2]),
        *(*given.rows, *[0] * (4 - len(given.rows)), DTYPES[given.y.dtype], 0),
        *(is_vectors, blocks.cluster, blocks.tokens, seed, blocks.chunks, blocks.rows, end),
    ]
    assert kernel.run(struct.pack(f"4qd{len(fields) - 5}q", *fields)) == b""
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


def gates(num_tokens: int, columns: int, half: int, rank: int, seed: int = 0) -> Operands:
    """Gate and up of some tokens, of which some have neither and some have one of both changed."""
    given = made(Case(num_tokens, columns, (half, half), rank, is_vectors=True), torch.bfloat16, seed)
    scales = given.scales.clone()
    scales[1], scales[2, 0], scales[2, 1] = 1.5, 0.0, 0.7
    given.slots[-1] = 2
    given.a[2, :rank] = torch.nan  # of a part that is not changed
    return replace(given, scales=at_the_end(scales))


@pytest.mark.parametrize(
    ("num_tokens", "columns", "half", "rank"),
    [(1, 40, 9, 8), (10, 72, 300, 16), pytest.param(34, 4200, 2100, 24, marks=pytest.mark.long)],
    ids=str,
)
def test_a_gate_has_the_bits_of_both_ops(
    kernel: ctypes.CDLL, num_tokens: int, columns: int, half: int, rank: int
) -> None:
    """But for its exponential; ranks of gate and up share a tile of A or have one each."""
    given = gates(num_tokens, columns, half, rank)
    ways = BY_ADAPTERS[:: 2 if num_tokens < 20 else 3]
    found = [run(kernel, given, blocks, is_vectors=True, is_gated=True) for blocks in ways]
    plain = run(kernel, given, BY_ADAPTERS[0], is_vectors=True)
    check(plain, given)
    gate, up = plain.float().chunk(2, dim=1)
    exact = (gate / (1 + (-gate).exp())).bfloat16().float() * up
    torch.testing.assert_close(found[0].float(), exact, rtol=2**-7, atol=1e-9)
    assert all(torch.equal(one, found[0]) for one in found[1:])
    alone = one_token(given, num_tokens - 1)
    assert torch.equal(run(kernel, alone, BY_ADAPTERS[0], is_vectors=True, is_gated=True)[0], found[0][-1])


def norms(given: Operands, seed: int = 0) -> Normed:
    generator = torch.Generator().manual_seed(seed)
    num_tokens, width = given.y.shape
    wide = torch.full((num_tokens, width + 3), torch.nan, dtype=torch.bfloat16)
    residual = wide[:, 1 : width + 1].copy_(torch.randn(num_tokens, width, generator=generator))
    weight = at_the_end(torch.rand(width, generator=generator).bfloat16() + 0.5)
    return Normed(residual, weight, torch.full((num_tokens, width), torch.nan, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("num_tokens", "columns", "width", "rank"),
    [
        *((1, 40, 9, 8), (10, 72, 2048, 16)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((34, 4200, 520, 24), (264, 40, 16, 8))),
    ],
    ids=str,
)
def test_a_norm_has_the_bits_of_its_ops_but_for_the_order_of_the_mean(
    kernel: ctypes.CDLL, num_tokens: int, columns: int, width: int, rank: int
) -> None:
    """Tokens without an adapter too, whose blocks meet all the same."""
    given = made(Case(num_tokens, columns, (width,), rank, is_vectors=True), torch.bfloat16)
    normed, results = norms(given), []
    plain = run(kernel, given, BY_ADAPTERS[0], is_vectors=True)
    wanted, total = add_rms_norm(plain, normed.residual, normed.weight, EPS)
    for blocks in BY_ADAPTERS[1 : 3 if num_tokens < 20 else 2]:
        normed.total.fill_(torch.nan)
        results.append(run(kernel, given, blocks, is_vectors=True, normed=normed))
        assert torch.equal(normed.total, total)
        torch.testing.assert_close(results[-1], wanted, rtol=2**-7, atol=0)
        assert (results[-1] == wanted).float().mean() > 0.9
    check(plain, given)
    alone = one_token(given, num_tokens - 1)
    own = Normed(normed.residual[-1:], normed.weight, normed.total[-1:].clone())
    assert torch.equal(run(kernel, alone, BY_ADAPTERS[1], is_vectors=True, normed=own)[0], results[0][-1])
    assert torch.equal(own.total, normed.total[-1:])


@pytest.mark.parametrize("slot", [1, -1])
def test_blocks_that_norm_may_run_in_any_order(kernel: ctypes.CDLL, slot: int) -> None:
    """Round after round, of whose halves the last has one token."""
    given = made(Case(21, 72, (40,), rank=8, is_vectors=True), torch.bfloat16, seed=3)
    given.slots.fill_(slot)
    normed, results = norms(given), []
    for seed in range(3):
        normed.total.fill_(torch.nan)
        out = run(kernel, given, BY_ADAPTERS[0], is_vectors=True, seed=seed, normed=normed)
        results.append(torch.cat([out, normed.total]))
    assert results[0].isfinite().all()
    assert all(torch.equal(one, results[0]) for one in results[1:])
