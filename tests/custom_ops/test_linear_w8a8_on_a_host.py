"""The CUDA kernel that quantizes few rows while weights stream in, run as C++ in clusters of fibers."""

import ctypes
import struct
from typing import NamedTuple

import pytest
import torch

from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8
from lamina.custom_ops.quantize_rows.reference import quantize_rows
from lamina.custom_ops.scaled_linear.reference import scaled_linear

from . import host_kernels, quantized
from .guarded import at_the_end

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = ctypes.CDLL(str(host_kernels.build("linear_w8a8", tmp_path_factory.mktemp("fp8"))))
    found.run.restype = ctypes.c_char_p
    return found


class Case(NamedTuple):
    """A launch: rows of x, weight rows and columns, and by which blocks."""

    num_rows: int
    n: int
    k: int
    warpgroups: int = 1
    split_k: int = 1
    stages: int = 2


CASES = [
    # one tile; columns that are no whole tile, or stage; more steps than stages; rows that are no block's
    Case(1, 64, 128),
    Case(8, 64, 16),
    Case(5, 136, 400, warpgroups=2),
    Case(3, 200, 1808, stages=3),
    # sums that are sent; blocks without a column
    Case(8, 128, 1040, warpgroups=2, split_k=2),
    Case(2, 72, 640, split_k=4),
    Case(7, 128, 272, warpgroups=2, split_k=8),
    Case(11, 64, 528, split_k=2),  # two blocks' rows of x
]


@quantized.every_kind
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_quantized_as_by_the_formula_in_whatever_order_threads_run(
    kernel: ctypes.CDLL, case: Case, dtype: torch.dtype, grouped: bool
) -> None:
    torch.manual_seed(case.k)
    weight, scale = quantized.weights(case.n, case.k, grouped=grouped, dtype=dtype)
    x = torch.full((case.num_rows, case.k + 8), torch.nan).bfloat16()[:, : case.k]
    x.copy_(torch.randn(case.num_rows, case.k) * torch.rand(case.num_rows, 1))
    bias, scale = at_the_end(torch.randn(case.n).bfloat16()), at_the_end(scale)
    out = torch.full((case.num_rows, case.n), torch.nan).bfloat16()
    pointers = [tensor.data_ptr() for tensor in (x, weight, scale, bias, out)]
    groups = scale.shape[1] if grouped else 0
    blocks = case.warpgroups, case.split_k, case.stages, dtype == torch.int8, case.n
    numbers = case.num_rows, case.n, case.k, x.stride(0), groups, *blocks
    assert kernel.run(struct.pack("15q", *pointers, *numbers)) == b""
    operands = *quantize_rows(x, 128 if grouped else 0, dtype), weight, scale
    exact = scaled_linear(*operands, bias.double(), torch.float64)
    sizes = [quantized.absolute(part) for part in operands]
    quantized.check(out, exact, scaled_linear(*sizes, bias.double().abs(), torch.float64))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_a_row_of_zeros_and_one_that_is_no_number_leave_the_others_alone(
    kernel: ctypes.CDLL, dtype: torch.dtype
) -> None:
    weight, scale = quantized.weights(64, 256, grouped=False, dtype=dtype)
    x, out = torch.randn(4, 256).bfloat16(), torch.empty(4, 64).bfloat16()
    x[1], x[2, 7] = 0, torch.nan
    pointers = [tensor.data_ptr() for tensor in (x, weight, scale)]
    numbers = 4, 64, 256, 256, 0, 1, 2, 2, dtype == INT8, 0
    assert kernel.run(struct.pack("15q", *pointers, 0, out.data_ptr(), *numbers)) == b""
    assert out[1].eq(0).all()
    assert out[2].isnan().all()
    right = scaled_linear(*quantize_rows(x[::3], 0, dtype), weight, scale, None, torch.float32)
    torch.testing.assert_close(out[::3].float(), right, rtol=2**-7, atol=1e-3)
