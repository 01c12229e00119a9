"""The GEMM of a persistent kernel, run as C++ in clusters of fibers: its barriers, copies and registers."""

import ctypes
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lamina.custom_ops.linear import reference
from lamina.custom_ops.quantize_rows.reference import quantize_rows
from lamina.custom_ops.scaled_linear.reference import scaled_linear
from lamina.custom_ops.silu_and_mul import reference as gate

from . import host_kernels, quantized
from .guarded import at_the_end

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
DTYPES = torch.float64, torch.bfloat16


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = ctypes.CDLL(str(host_kernels.build("persistent_gemm", tmp_path_factory.mktemp("resident"))))
    found.run.restype = ctypes.c_char_p
    return found


# groups, rows of x at once, share, split, clusters, weight rows, columns, rows of x, whether gated: whole
# tiles and one whose columns are shared, many such, of two sections of x; blocks that hand each other x, and
# share the columns too, three strips, or four; clusters that share three strips, and the columns of each
CASES = [
    (1, 128, 1, 2, 1, 5 * 64, 200, 100, False),
    (1, 128, 1, 2, 1, 5 * 64, 72, 100, True),
    (2, 128, 1, 4, 1, 5 * 128 - 16, 136, 140, False),
    (2, 128, 2, 2, 1, 11 * 64 - 16, 264, 100, False),
    (2, 128, 2, 1, 2, 11 * 64 + 48, 648, 128, True),
    (2, 192, 2, 1, 1, 3 * 64, 136, 70, False),
    (2, 192, 2, 1, 1, 8 * 64 - 24, 136, 190, False),
    (2, 192, 1, 2, 2, 11 * 64 - 8, 136, 190, False),
    (2, 192, 1, 2, 2, 3 * 64, 264, 192, True),
    # three tiles whose columns are shared, of sums that begin in the last stage; few rows
    (2, 128, 1, 4, 1, 6 * 64 - 16, 328, 100, False),
    (1, 128, 1, 2, 1, 2 * 64, 72, 5, False),
    # strips in threes behind two rounds of whole tiles, and for more than two neighbours; too many for that
    (2, 192, 1, 2, 2, 19 * 64 - 8, 72, 190, False),
    (2, 192, 1, 2, 4, 6 * 64, 72, 20, False),
    (2, 128, 2, 1, 4, 9 * 64, 72, 20, True),
    (2, 128, 2, 1, 6, 20 * 64, 64, 20, True),
    (2, 192, 1, 2, 2, 2 * 64, 72, 200, False),
    # more sections of x than are multiplied by all strips before others are, of which the last are fewer
    (1, 128, 1, 2, 2, 3 * 64, 72, 2048 + 200, False),
    (2, 128, 2, 1, 3, 5 * 64 - 16, 72, 2048 + 130, True),
    (2, 192, 1, 2, 3, 64, 72, 1920 + 20, False),
]


def launched(
    kernel: ctypes.CDLL,
    case: tuple[int, int, int, int, int, int, int, int, bool],
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: int = 0,
    scales: tuple[Tensor, Tensor] | None = None,
    splits_all: bool = False,
    promises_x: bool = False,
) -> Tensor:
    """What the kernel writes, its threads in an order of a seed."""
    groups, section, share, split, clusters, n, k, num_rows, is_gated = case
    out = torch.full((num_rows, n // 2 if is_gated else n), torch.nan).bfloat16()
    pointers = [tensor.data_ptr() for tensor in (x, weight, bias, out)]
    numbers = num_rows, n, k, x.stride(0), groups, section, share, split, clusters, is_gated, seed
    more = [0] * 6
    if scales is not None:
        of_x, of_weight = scales
        strides = (1, 0, 0) if of_weight.dim() == 1 else (*of_x.stride(), of_weight.shape[1])
        more = [of_x.data_ptr(), of_weight.data_ptr(), *strides, weight.dtype == torch.int8]
    assert kernel.run(struct.pack("23q", *pointers, *numbers, *more, splits_all, promises_x)) == b""
    return out


# as above: one block's rows; split columns; sections of x; three strips of two neighbours, and of clusters
SCALED_CASES = [
    (1, 128, 1, 2, 1, 5 * 64, 400, 100, False),
    (1, 128, 1, 2, 1, 2 * 64, 144, 5, False),
    (2, 128, 1, 2, 1, 5 * 128 - 16, 272, 140, False),
    (2, 128, 2, 1, 2, 11 * 64 + 48, 656, 128, False),
    (2, 128, 2, 1, 4, 9 * 64, 144, 20, False),
    (2, 192, 2, 1, 1, 8 * 64 - 24, 272, 190, False),
    (2, 192, 1, 2, 2, 11 * 64 - 8, 1280, 190, False),
    # rows of x that are summed up in halves, of one tile and of two strips that share a third
    (2, 256, 2, 1, 1, 5 * 64, 272, 256, False),
    (2, 256, 1, 2, 2, 3 * 64, 528, 250, False),
]


@quantized.every_kind
@pytest.mark.parametrize("case", SCALED_CASES, ids=str)
def test_the_same_in_one_byte_with_scales_of_rows_or_of_groups(
    kernel: ctypes.CDLL,
    case: tuple[int, int, int, int, int, int, int, int, bool],
    dtype: torch.dtype,
    grouped: bool,
) -> None:
    *_, n, k, num_rows, _ = case
    torch.manual_seed(n)
    weight, scale = quantized.weights(n, k, grouped=grouped, dtype=dtype)
    x, x_scale = quantize_rows(torch.randn(num_rows, k), 128 if grouped else 0, dtype)
    bias = at_the_end(torch.randn(n).bfloat16())
    operands = x, at_the_end(x_scale) if not grouped else x_scale, weight, at_the_end(scale)
    out = launched(kernel, case, x, weight, bias, 0, (operands[1], operands[3]))
    exact = scaled_linear(*operands, bias.double(), torch.float64)
    sizes = [quantized.absolute(part) for part in operands]
    quantized.check(out, exact, scaled_linear(*sizes, bias.double().abs(), torch.float64))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_persistent_kernel_gives_the_product_in_whatever_order_threads_run(
    assert_close_to_reference: Callable[..., None],
    kernel: ctypes.CDLL,
    case: tuple[int, int, int, int, int, int, int, int, bool],
) -> None:
    *_, n, k, num_rows, is_gated = case
    torch.manual_seed(n)
    x = torch.full((num_rows, k + 8), torch.nan).bfloat16()[:, :k].normal_()
    weight, bias = (torch.randn(n, k) / k**0.5).bfloat16(), at_the_end(torch.randn(n).bfloat16())
    out = launched(kernel, case, x, weight, bias)
    gemms = [reference.linear(*(t.to(dtype).contiguous() for t in (x, weight, bias))) for dtype in DTYPES]
    exact, naive = (gate.silu_and_mul(gemm) if is_gated else gemm for gemm in gemms)
    assert_close_to_reference(out, exact, naive)


@pytest.mark.parametrize("seed", range(6))
def test_sums_arrive_where_no_tile_is_still_read(kernel: ctypes.CDLL, seed: int) -> None:
    """Of columns for more steps than stages, of which one block may be far ahead of the other."""
    torch.manual_seed(seed)
    x, weight, bias = torch.randn(8, 1280).bfloat16(), torch.randn(64, 1280).bfloat16(), torch.zeros(64)
    out = launched(kernel, (1, 128, 1, 2, 1, 64, 1280, 8, False), x, weight, bias.bfloat16(), seed)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]], ids=str)
def test_the_kernel_behind_begins_only_when_x_is_there_where_that_is_promised(
    kernel: ctypes.CDLL, case: tuple[int, int, int, int, int, int, int, int, bool]
) -> None:
    *_, n, k, num_rows, _ = case
    torch.manual_seed(n)
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((num_rows, k), (n, k), (n,)))
    promising = launched(kernel, case, x, weight, bias, promises_x=True)
    assert torch.equal(promising, launched(kernel, case, x, weight, bias))


def test_gate_and_up_are_rounded_before_they_meet(kernel: ctypes.CDLL) -> None:
    """Of one column of powers of 2, so that each GEMM and its bias are one exact sum."""
    torch.manual_seed(7)
    x, weight = torch.zeros(16, 8).bfloat16(), torch.zeros(320, 8).bfloat16()
    x[:, 0], weight[:, 0] = 2.0 ** (torch.arange(16) % 5 - 2), torch.randn(320)
    bias = torch.randn(320).bfloat16()
    out = launched(kernel, (1, 128, 1, 2, 1, 320, 8, 16, True), x, weight, bias)
    gated, up = (x[:, :1].float() * weight[:, 0].float() + bias.float()).bfloat16().double().chunk(2, dim=1)
    right = (torch.nn.functional.silu(gated).bfloat16().double() * up).bfloat16()
    assert (out == right).double().mean() > 0.99  # exp itself may be the one or the other neighbour


# groups, rows of x at once, share, split, clusters: of tiles that fill several waves, the last not whole
ONE_ORDER = [(1, 128, 1, 2, 1), (2, 192, 1, 2, 2), (2, 192, 2, 1, 1)]


@pytest.mark.parametrize("shape", ONE_ORDER, ids=str)
def test_every_tile_sums_in_one_order_where_that_is_asked_for(
    kernel: ctypes.CDLL, shape: tuple[int, int, int, int, int]
) -> None:
    """Of the halves of K, whose sums are added, or of K as a whole; in whatever wave."""
    _, _, _, split_k, _ = shape
    n, k, num_rows = 11 * 64 - 8, 512, 190
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, k).bfloat16(), torch.randn(n, k).bfloat16()
    out = launched(
        kernel, (*shape, n, k, num_rows, False), x, weight, torch.zeros(n).bfloat16(), splits_all=True
    )
    parts = zip(x.chunk(split_k, dim=1), weight.chunk(split_k, dim=1), strict=True)
    halves = [by_columns(*part) for part in parts]
    assert torch.equal(out, sum(halves[1:], halves[0]).bfloat16())


def by_columns(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32, one column after another, as the host adds up."""
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for left, right in zip(x.float().T, weight.float().T, strict=True):
        sums += left[:, None] * right[None]
    return sums
