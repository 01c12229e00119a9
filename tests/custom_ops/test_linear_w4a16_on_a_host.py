"""The CUDA kernel of weights of four and eight bits, as C++ in clusters of fibers: barriers, registers."""

import ctypes
import itertools
import struct
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lamina.custom_ops.linear_w4a16 import layout
from lamina.custom_ops.linear_w4a16.configs import MMA, PACED, PLAIN, WARPGROUPS, group_shift, shared_bytes
from lamina.custom_ops.linear_w4a16.op import num_groups
from lamina.custom_ops.linear_w4a16.reference import dequantize
from lamina.custom_ops.silu_and_mul import reference as gate

from . import host_kernels

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
SUM_ERROR = 4e-6  # of a sum in float32, by the sum of its terms' sizes


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = ctypes.CDLL(str(host_kernels.build("linear_w4a16", tmp_path_factory.mktemp("nibbles"))))
    found.run.restype = found.write_out.restype = ctypes.c_char_p
    return found


every_width = pytest.mark.parametrize("bits", [4, 8])


@every_width
@pytest.mark.parametrize("group", [32, 64, 128, 256, 4096, -1])
def test_python_counts_the_shared_memory_that_the_kernel_takes(
    kernel: ctypes.CDLL, group: int, bits: int
) -> None:
    for warpgroups, sizes in WARPGROUPS.items():
        for tokens, stages, zero in itertools.product(sizes, (2, 3, 24), (False, True)):
            counted = shared_bytes(warpgroups, tokens, group, stages, zero=zero, bits=bits)
            shift = group_shift(group, 1 << 20)
            arguments = bits, warpgroups, ctypes.c_int64(tokens), shift, stages, int(zero)
            assert kernel.shared_bytes(*arguments) == counted, (warpgroups, tokens, stages, zero)


class Case(NamedTuple):
    """A launch: how many rows of x, weight rows and columns, and by which blocks."""

    num_rows: int
    n: int
    k: int
    group: int
    warpgroups: int
    tokens: int
    multicast: int = 1
    split_k: int = 1
    stages: int = 2
    zero: bool = True
    gated: bool = False
    by_warps: bool = False
    bits: int = 4
    plain: bool = False
    paces: bool = False


CASES = [
    # every group; one tile; columns that are no whole stage; more steps than stages; rows that are no block's
    Case(1, 64, 64, 32, 1, 8),
    Case(7, 128, 320, 32, 2, 8, zero=False),
    Case(8, 192, 832, 64, 2, 8, stages=3),
    Case(5, 128, 1344, 128, 1, 8, split_k=2),
    Case(9, 64, 576, 256, 1, 8, split_k=2, zero=False),
    Case(3, 128, 1088, -1, 2, 8, split_k=4),
    Case(2, 64, 192, 32, 1, 8, split_k=8),  # blocks without a column
    # sums that are sent, and that are kept; x by multicast, for blocks of which one has no rows of weights
    Case(16, 128, 704, 64, 1, 16, multicast=2, split_k=2),
    Case(20, 192, 448, 32, 1, 32, multicast=2, zero=False),
    Case(40, 192, 320, 128, 1, 32, split_k=2),
    Case(33, 256, 320, 64, 4, 32, stages=3),
    Case(60, 128, 320, 128, 1, 64, split_k=2),
    Case(64, 192, 192, 32, 1, 64, multicast=2, split_k=2, zero=False),
    # gate and up
    Case(8, 256, 448, 64, 2, 8, split_k=2, gated=True),
    Case(30, 384, 320, 32, 2, 32, multicast=2, split_k=2, gated=True),
    Case(50, 384, 256, -1, 2, 64, gated=True, zero=False),
    # by mma.sync
    Case(5, 128, 1344, 128, 1, 8, split_k=2, stages=3, by_warps=True),
    Case(8, 64, 320, 32, 1, 8, zero=False, by_warps=True),
    Case(7, 256, 448, 64, 2, 8, split_k=2, gated=True, by_warps=True),
    Case(19, 192, 704, 64, 2, 16, multicast=2, split_k=2, by_warps=True),
    Case(30, 128, 576, -1, 1, 32, by_warps=True),
]
# The same of eight bits, as far as anything differs by them.
CASES += [
    Case(1, 64, 64, 32, 1, 8, zero=False, bits=8),
    Case(7, 128, 320, 32, 2, 8, stages=3, bits=8),
    Case(5, 128, 1344, 128, 1, 8, split_k=2, bits=8),
    Case(20, 192, 448, 32, 1, 32, multicast=2, zero=False, bits=8),
    Case(64, 192, 192, 64, 1, 64, multicast=2, split_k=2, zero=False, bits=8),
    Case(33, 256, 320, -1, 4, 32, stages=3, bits=8),
    Case(30, 384, 320, 32, 2, 32, multicast=2, split_k=2, zero=False, gated=True, bits=8),
    Case(7, 256, 448, 32, 2, 8, split_k=2, zero=False, gated=True, by_warps=True, bits=8),
    Case(19, 192, 704, 64, 2, 16, multicast=2, split_k=2, by_warps=True, bits=8),
    Case(30, 128, 576, 32, 1, 32, by_warps=True, bits=8),
]


def launched(kernel: ctypes.CDLL, case: Case, parts: list[Tensor | None], x: Tensor, seed: int) -> Tensor:
    """What the kernel writes, its threads in an order of a seed."""
    out = torch.full((case.num_rows, case.n // 2 if case.gated else case.n), torch.nan).bfloat16()
    pointers = [0 if part is None else part.data_ptr() for part in (x, *parts, out)]
    shift = group_shift(case.group, case.k)
    assert shift is not None
    shape = case.num_rows, case.n, case.k, x.stride(0), num_groups(case.k, case.group), shift
    config = case.warpgroups, case.tokens, case.multicast, case.split_k, case.stages
    rest = case.gated, seed, MMA * case.by_warps + PLAIN * case.plain + PACED * case.paces, case.bits
    assert kernel.run(struct.pack("21q", *pointers, *shape, *config, *rest)) == b""
    return out


def operands(case: Case, seed: int) -> tuple[Tensor, list[Tensor | None], Tensor, Tensor]:
    """x between NaN, the parts shuffled, the dense weights and the bias."""
    torch.manual_seed(seed)
    x = torch.full((case.num_rows, case.k + 8), torch.nan).bfloat16()[:, : case.k].normal_()
    weight = torch.randint(0, 256, (case.n, case.k * case.bits // 8), dtype=torch.uint8)
    weight = weight if case.bits == 4 else weight.view(torch.int8)
    scale, zero = (torch.randn(2, case.n, num_groups(case.k, case.group)) / case.k**0.5).bfloat16()
    bias = torch.randn(case.n).bfloat16()
    dense = dequantize(weight, scale, zero if case.zero else None, case.group)
    shuffled = layout.shuffle_groups(zero) if case.zero else None
    return x, [layout.shuffle(weight), layout.shuffle_groups(scale), shuffled, bias], dense, bias


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_gives_the_product_in_whatever_order_threads_run(kernel: ctypes.CDLL, case: Case) -> None:
    for seed in range(2):
        x, parts, dense, bias = operands(case, seed)
        out = launched(kernel, case, parts, x, seed).double()
        exact = x.double() @ dense.double().T + bias.double()
        sizes = x.double().abs() @ dense.double().abs().T
        if case.gated:
            right = gate.silu_and_mul(exact.bfloat16()).double()
            assert ((out - right).abs() <= 2**-6 * right.abs() + 1e-5 * sizes.sum(1, keepdim=True)).all()
            assert ((out - right).abs() <= 2**-7 * right.abs()).double().mean() > 0.98
        else:
            assert ((out - exact).abs() <= exact.abs() * 2**-8 + sizes * SUM_ERROR).all()


PLAIN_CASES = [
    Case(5, 128, 1344, 128, 1, 8, split_k=2, stages=3, zero=False, by_warps=True),
    Case(7, 256, 448, 128, 2, 8, split_k=2, zero=False, gated=True, by_warps=True),
    Case(30, 384, 320, 128, 2, 32, multicast=2, split_k=2, zero=False, gated=True),
    Case(60, 128, 320, 128, 1, 64, split_k=2, zero=False),
    Case(6, 64, 2432, 128, 1, 8, stages=3, zero=False, by_warps=True),
]


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_the_kernel_for_plain_groups_has_the_bits_of_that_for_any(kernel: ctypes.CDLL, case: Case) -> None:
    for seed in range(2):
        x, parts, *_ = operands(case, seed)
        wanted = launched(kernel, case, parts, x, seed)
        other = case._replace(plain=True, paces=bool(seed))
        assert torch.equal(launched(kernel, other, parts, x, seed + 1), wanted)


def test_weights_by_one_multiply_add_have_the_bits_of_those_for_any_groups(kernel: ctypes.CDLL) -> None:
    """Every number by every scale in bfloat16, but for sizes that no weights have."""
    kernel.count_other_weights.restype = ctypes.c_int64
    assert kernel.count_other_weights() == 0


@pytest.mark.parametrize("seed", range(4))
def test_registers_are_not_written_while_a_product_reads_them(kernel: ctypes.CDLL, seed: int) -> None:
    """Through many steps of few stages, of which a block may be far ahead of another."""
    case = Case(8, 128, 2432, 64, 1, 8, multicast=1, split_k=2)
    x, parts, dense, bias = operands(case, seed)
    out = launched(kernel, case, parts, x, seed).double()
    exact = x.double() @ dense.double().T + bias.double()
    assert ((out - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


@every_width
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("n, k, group", [(64, 64, 32), (128, 192, 64), (192, 320, 128), (64, 320, -1)])
def test_weights_are_written_out_to_the_bit(
    kernel: ctypes.CDLL, n: int, k: int, group: int, zero: bool, bits: int
) -> None:
    case = Case(0, n, k, group, 1, 8, zero=zero, bits=bits)
    _, parts, dense, _ = operands(case, 5)
    out = torch.full((n, k), torch.nan).bfloat16()
    pointers = [0, *(0 if part is None else part.data_ptr() for part in parts), out.data_ptr()]
    shape = 0, n, k, 0, num_groups(k, group), group_shift(group, k)
    assert kernel.write_out(struct.pack("21q", *pointers, *shape, *[0] * 6, 3, 0, bits)) == b""
    assert torch.equal(out, dense)
