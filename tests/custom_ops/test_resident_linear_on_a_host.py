"""The product whose blocks stay, run as C++ in clusters of fibers: its barriers, copies and registers."""

import ctypes
import struct
from collections.abc import Callable

import pytest
import torch

from lamina.custom_ops.linear import reference
from lamina.custom_ops.silu_and_mul import reference as gate

from . import host_kernels

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
DTYPES = torch.float64, torch.bfloat16


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = ctypes.CDLL(str(host_kernels.build("resident_linear", tmp_path_factory.mktemp("resident"))))
    found.run.restype = ctypes.c_char_p
    return found


# groups, rows of x at once, share, split, clusters, weight rows, columns, rows of x, whether gated: whole
# tiles and one whose columns are shared, many such, of two sections of x; blocks that hand each other x, and
# share the columns too, three strips, or four; clusters that share three strips, and the columns of each
CASES = [
    (1, 128, 1, 2, 1, 5 * 64, 200, 100, False),
    (1, 128, 1, 2, 1, 5 * 64, 72, 100, True),
    (2, 128, 1, 4, 1, 5 * 128 - 16, 136, 140, False),
    (2, 128, 2, 2, 1, 7 * 128 - 16, 264, 100, False),
    (2, 128, 2, 1, 2, 11 * 64 + 48, 648, 128, True),
    (2, 192, 2, 1, 1, 3 * 64, 136, 70, False),
    (2, 192, 2, 1, 1, 8 * 64 - 24, 136, 190, False),
    (2, 192, 1, 2, 2, 11 * 64 - 8, 136, 190, False),
    (2, 192, 1, 2, 2, 3 * 64, 264, 192, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_that_stay_give_the_product_in_whatever_order_threads_run(
    assert_close_to_reference: Callable[..., None],
    kernel: ctypes.CDLL,
    case: tuple[int, int, int, int, int, int, int, int, bool],
) -> None:
    groups, section, share, split, clusters, n, k, num_rows, is_gated = case
    width = n // 2 if is_gated else n
    torch.manual_seed(n)
    x = torch.full((num_rows, k + 8), torch.nan).bfloat16()[:, :k].normal_()
    weight, bias = (torch.randn(n, k) / k**0.5).bfloat16(), torch.randn(n).bfloat16()
    out = torch.full((num_rows, width), torch.nan).bfloat16()
    pointers = [tensor.data_ptr() for tensor in (x, weight, bias, out)]
    numbers = num_rows, n, k, x.stride(0), groups, section, share, split, clusters, is_gated, n + k
    assert kernel.run(struct.pack("15q", *pointers, *numbers)) == b""
    products = [reference.linear(*(t.to(dtype).contiguous() for t in (x, weight, bias))) for dtype in DTYPES]
    exact, naive = (gate.silu_and_mul(product) if is_gated else product for product in products)
    assert_close_to_reference(out, exact, naive)
