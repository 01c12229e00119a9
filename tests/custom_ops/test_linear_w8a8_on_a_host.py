"""The CUDA kernel that quantizes few rows while weights stream in, run as C++ in clusters of fibers."""

import ctypes
import struct
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8
from lamina.custom_ops.quantize_rows.reference import quantize_rows
from lamina.custom_ops.scaled_linear.reference import scaled_linear
from lamina.custom_ops.silu_and_mul.reference import silu_and_mul

from . import host_kernels, quantized
from .guarded import at_the_end

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = ctypes.CDLL(str(host_kernels.build("linear_w8a8", tmp_path_factory.mktemp("fp8"))))
    found.run.restype = found.gate.restype = ctypes.c_char_p
    return found


def divided(kernel: ctypes.CDLL, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, torch.nan)
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, scale, out))
    kernel.divide(*pointers, ctypes.c_int64(len(x)))
    return out


@given(exponent=st.integers(-135, 119), seed=st.integers(0, 999), dtype=st.sampled_from([FP8, INT8]))
def test_values_are_divided_by_their_scale_to_the_bit(
    kernel: ctypes.CDLL, exponent: int, seed: int, dtype: torch.dtype
) -> None:
    """Quotients that do not become zero are the same floats, and all become the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    scale = (1 + torch.rand(4096, generator=generator)) * 2.0**exponent
    parts = (2 * torch.rand(4096, generator=generator) - 1) * (448 if dtype == FP8 else 127)
    x = parts * 2.0 ** -torch.randint(0, 40, (4096,), generator=generator) * scale
    x[:2] = torch.tensor([0.0, -0.0])
    found, wanted = divided(kernel, x, scale), x / scale
    counts = wanted.abs() > 2.0**-12
    assert torch.equal(found[counts], wanted[counts])
    rounded = [quotient.round() if dtype == INT8 else quotient for quotient in (found, wanted)]
    assert torch.equal(*(quotient.to(dtype).view(torch.uint8) for quotient in rounded))


def test_by_an_infinite_scale_numbers_are_zeros_and_infinities_are_none(kernel: ctypes.CDLL) -> None:
    x = torch.tensor([1.0, -3e38, torch.inf, torch.nan])
    found = divided(kernel, x, torch.full((4,), torch.inf))
    assert found.tolist()[:2] == [0.0, 0.0]
    assert found.signbit().tolist()[:2] == [False, True]
    assert found[2:].isnan().all()


class Case(NamedTuple):
    """A launch: rows of x, weight rows and columns, and by which blocks."""

    num_rows: int
    n: int
    k: int
    warpgroups: int = 1
    split_k: int = 1
    stages: int = 2
    shares_peaks: bool = False  # which blocks that divide columns find of their own
    paces: bool = False  # the first weights are loaded at a pace


CASES = [
    # one tile; columns that are no whole tile, or stage; more steps than stages; rows that are no block's
    Case(1, 64, 128),
    Case(8, 64, 16),
    Case(5, 136, 400, warpgroups=2),
    Case(3, 200, 1808, stages=3, paces=True),
    # sums that are sent; blocks without a column
    Case(8, 128, 1040, warpgroups=2, split_k=2),
    Case(2, 72, 640, split_k=4),
    Case(7, 128, 272, warpgroups=2, split_k=8),
    Case(11, 64, 528, split_k=2),  # two blocks' rows of x
    # of more columns than a block loads at once, and of less
    Case(8, 128, 1040, warpgroups=2, split_k=2, shares_peaks=True),
    Case(1, 72, 3600, split_k=2, stages=3, shares_peaks=True),
    Case(3, 72, 640, split_k=4, shares_peaks=True, paces=True),
    Case(7, 128, 272, warpgroups=2, split_k=8, shares_peaks=True),
    Case(11, 64, 4112, split_k=8, shares_peaks=True),
]


@quantized.every_kind
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_quantized_as_by_the_formula_in_whatever_order_threads_run(
    kernel: ctypes.CDLL, case: Case, dtype: torch.dtype, grouped: bool
) -> None:
    if grouped and case.shares_peaks:
        pytest.skip("every block has its groups whole")
    torch.manual_seed(case.k)
    weight, scale = quantized.weights(case.n, case.k, grouped=grouped, dtype=dtype)
    x = torch.full((case.num_rows, case.k + 8), torch.nan).bfloat16()[:, : case.k]
    x.copy_(torch.randn(case.num_rows, case.k) * torch.rand(case.num_rows, 1))
    bias, scale = at_the_end(torch.randn(case.n).bfloat16()), at_the_end(scale)
    out = torch.full((case.num_rows, case.n), torch.nan).bfloat16()
    pointers = [tensor.data_ptr() for tensor in (x, weight, scale, bias, out)]
    groups = scale.shape[1] if grouped else 0
    blocks = case.warpgroups, case.split_k, case.stages, dtype == torch.int8, case.n
    blocks = *blocks, case.shares_peaks, case.paces
    numbers = case.num_rows, case.n, case.k, x.stride(0), groups, *blocks
    assert kernel.run(struct.pack("17q", *pointers, *numbers)) == b""
    operands = *quantize_rows(x, 128 if grouped else 0, dtype), weight, scale
    exact = scaled_linear(*operands, bias.double(), torch.float64)
    sizes = [quantized.absolute(part) for part in operands]
    quantized.check(out, exact, scaled_linear(*sizes, bias.double().abs(), torch.float64))  # type: ignore[arg-type]


@pytest.mark.parametrize("split_k, shares_peaks", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_a_row_of_zeros_and_one_that_is_no_number_leave_the_others_alone(
    kernel: ctypes.CDLL, dtype: torch.dtype, split_k: int, shares_peaks: bool
) -> None:
    weight, scale = quantized.weights(64, 512, grouped=False, dtype=dtype)
    x, out = torch.randn(4, 512).bfloat16(), torch.empty(4, 64).bfloat16()
    x[1], x[2, 7] = 0, torch.nan
    pointers = [tensor.data_ptr() for tensor in (x, weight, scale)]
    numbers = 4, 64, 512, 512, 0, 1, split_k, 2, dtype == INT8, 0, shares_peaks, 0
    assert kernel.run(struct.pack("17q", *pointers, 0, out.data_ptr(), *numbers)) == b""
    assert out[1].eq(0).all()
    assert out[2].isnan().all()
    right = scaled_linear(*quantize_rows(x[::3], 0, dtype), weight, scale, None, torch.float32)
    torch.testing.assert_close(out[::3].float(), right, rtol=2**-7, atol=1e-3)


class Gate(NamedTuple):
    """A launch of the kernel of gate and up: rows of x, of both weights, columns, and by which blocks."""

    num_rows: int
    n: int
    k: int
    tokens: int = 8
    multicast: int = 1
    split_k: int = 1
    stages: int = 2


GATES = [
    # one tile; columns that are no whole tile; rows of weights that are no block's; more steps than stages
    Gate(1, 128, 128),
    Gate(8, 208, 400, stages=3),
    Gate(3, 144, 656, split_k=4),
    # x by multicast; sums that are kept; two blocks' rows of x
    Gate(30, 192, 400, tokens=32, multicast=2, split_k=2),
    Gate(66, 128, 272, tokens=64, split_k=2),
]


@quantized.every_kind
@pytest.mark.parametrize("case", GATES, ids=str)
def test_gate_and_up_are_multiplied_and_gated_in_one_kernel(
    kernel: ctypes.CDLL, case: Gate, dtype: torch.dtype, grouped: bool
) -> None:
    torch.manual_seed(case.k)
    weight, scale = quantized.weights(case.n, case.k, grouped=grouped, dtype=dtype)
    rows = torch.randn(case.num_rows, case.k) * torch.rand(case.num_rows, 1)
    operands = *quantize_rows(rows, 128 if grouped else 0, dtype), weight, scale * 0.1
    bias = torch.randn(case.n).bfloat16()
    out, promising = (torch.full((case.num_rows, case.n // 2), torch.nan).bfloat16() for _ in range(2))
    values, x_scale, *_ = operands = *operands[:3], at_the_end(operands[3])
    pointers = [part.data_ptr() for part in (values, weight, x_scale, operands[3], bias)]
    strides = (*x_scale.stride(), scale.shape[1]) if grouped else (1, 0, 0)
    config = case.tokens, case.multicast, case.split_k, case.stages, dtype == INT8, case.n
    numbers = case.num_rows, case.n, case.k, *strides, *config
    slots = torch.tensor([-1, 4, 0, 4, 2, 0, -1, 4] * 4, dtype=torch.int32)[: case.num_rows]
    a, b = torch.zeros(5, 3 * 16, dtype=torch.uint8), torch.zeros(5, 200 * 16, dtype=torch.uint8)
    behind = (*(one.data_ptr() for one in (a, b, slots)), a.shape[1], b.shape[1], len(a))
    for result in (out, promising):  # the latter with a kernel behind that is to find x there, and adapters
        more = (
            (True, *behind)
            if result is promising and case.num_rows <= 32
            else (result is promising, *[0] * 6)
        )
        assert kernel.gate(struct.pack("25q", *pointers, result.data_ptr(), *numbers, *more)) == b""
    assert torch.equal(promising, out)
    exact = scaled_linear(*operands, bias.double(), torch.float64)
    right = silu_and_mul(exact.bfloat16()).double()
    near, up = exact.chunk(2, dim=-1)
    off_by_two = 2**-7 * (2 * right.abs() + 2**-6 * (near.abs() + 1) * (up.abs() + 1))
    assert ((out.double() - right).abs() <= off_by_two).all()
    assert ((out.double() - right).abs() <= 2**-7 * right.abs() + 1e-9).double().mean() > 0.97
