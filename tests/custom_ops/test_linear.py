"""lamina::linear."""

import ctypes
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import linear
from lamina.custom_ops._shared import build
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.linear import _cpu
from lamina.custom_ops.linear.choices import Method

from .guarded import at_the_end, making_ended

CPU = torch.device("cpu")
NARROW = [torch.float32, torch.bfloat16, torch.float16]
sizes = st.one_of(st.integers(1, 100), st.sampled_from([16, 32, 64, 128]))


def make_operands(num_tokens: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens + 7 * rows + 13 * columns)
    x = torch.randn(num_tokens, columns, generator=generator)
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(rows, generator=generator).to(dtype)


def within_wider(tensor: Tensor) -> Tensor:
    """The same numbers as a slice of rows that go on with NaN."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + 5), torch.nan, dtype=tensor.dtype)
    wide[:, 2:-3] = tensor
    return wide[:, 2:-3]


def by_columns(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_its_formula_is_torch_linear(dtype: torch.dtype, num_tokens: int, with_bias: bool) -> None:
    x, weight = torch.randn(num_tokens, 8).to(dtype), torch.randn(6, 8).to(dtype)
    bias = torch.randn(6).to(dtype) if with_bias else None
    formula = select("linear", device=CPU, dtype=dtype, provider="reference").call
    assert torch.equal(formula(x, weight, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    torch.library.opcheck(torch.ops.lamina.linear.default, (x, weight, bias))


@given(
    num_tokens=sizes,
    rows=sizes,
    columns=sizes,
    dtype=st.sampled_from(NARROW),
    with_bias=st.booleans(),
    lie_x=st.sampled_from([torch.clone, within_wider, by_columns]),
    lie_weight=st.sampled_from([torch.clone, within_wider, by_columns]),
)
@example(600, 33, 64, torch.bfloat16, True, within_wider, within_wider)  # more tokens than are packed at once
@example(600, 33, 64, torch.float32, False, by_columns, torch.clone)
@example(5, 17, 0, torch.bfloat16, True, torch.clone, torch.clone)
@example(20, 20, 96, torch.bfloat16, True, torch.clone, torch.clone)  # a whole strip beside a part of one
def test_every_method_multiplies_as_well_as_the_library(
    assert_close_to_reference: Callable[..., None],
    num_tokens: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    with_bias: bool,
    lie_x: Callable[[Tensor], Tensor],
    lie_weight: Callable[[Tensor], Tensor],
) -> None:
    x, weight, bias = make_operands(num_tokens, rows, max(columns, 1), dtype)
    x, weight, bias = x[:, :columns].clone(), weight[:, :columns].clone(), bias if with_bias else None
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    naive = F.linear(x, weight, bias)
    x, weight = lie_x(x), lie_weight(weight)
    provider = select("linear", device=CPU, dtype=dtype, provider="cpu").call
    assert_close_to_reference(provider(x, weight, bias), wide, naive, floor=1e-5)
    for method in {Method.DOT, *_cpu.methods(dtype, 1)} if weight.stride(1) == 1 else ():
        assert_close_to_reference(_cpu.launch(x, weight, bias, method), wide, naive, floor=1e-5)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", [(3, 17, 40), (1, 1, 1), (20, 33, 33)], ids=str)
def test_nothing_is_read_beyond_its_end(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    given = make_operands(*shape, dtype)
    ended = making_ended(given[0]), at_the_end(given[1]), at_the_end(given[2])
    for method in {Method.DOT, *_cpu.methods(dtype, 1)}:
        assert torch.equal(_cpu.launch(*ended, method), _cpu.launch(*given, method))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("lie_x", [within_wider, by_columns])
def test_every_row_is_found_however_x_lies(lie_x: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Also of several rows that are packed together."""
    x, weight, bias = make_operands(20, 33, 40, dtype)
    for method in {Method.DOT, *_cpu.methods(dtype, 1)}:
        assert torch.equal(_cpu.launch(lie_x(x), weight, bias, method), _cpu.launch(x, weight, bias, method))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", [(70, 50, 100), (129, 16, 32)], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    x, weight, bias = make_operands(*shape, dtype)
    for method in _cpu.methods(dtype, 1):
        together = _cpu.launch(x, weight, bias, method)
        alone = torch.cat([_cpu.launch(row.unsqueeze(0), weight, bias, method) for row in x])
        assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("num_tokens", [2, 3, 7, 40])
def test_an_infinite_row_leaves_the_others_alone(dtype: torch.dtype, num_tokens: int) -> None:
    """Zeros behind the end of a row times its neighbour's infinity would be NaN."""
    x, weight, bias = make_operands(num_tokens, 33, 64, dtype)
    broken = x.clone()
    broken[1::2] = torch.inf
    for method in {Method.DOT, *_cpu.methods(dtype, 1)}:
        right, got = (_cpu.launch(rows, weight, bias, method) for rows in (x, broken))
        assert torch.equal(got[::2], right[::2])


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="tiles are x86's")
def test_amx_is_used_where_compiler_and_system_have_it() -> None:
    command = [*build.find_compiler(), "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    request_permission, tile_data = 0x1023, 18
    is_granted = ctypes.CDLL(None).syscall(158, request_permission, tile_data) == 0  # arch_prctl
    is_known = "__AMX_BF16__" in macros and "__AVX512BF16__" in macros
    assert (Method.AMX in _cpu.methods(torch.bfloat16, 1)) == (is_known and is_granted)


def test_tiles_leave_the_librarys_as_they_were() -> None:
    x, weight, _ = make_operands(64, 64, 64, torch.bfloat16)
    before = F.linear(x, weight)
    for _ in range(3):
        linear(x[:3, :40], weight[:, :40])
        assert torch.equal(F.linear(x, weight), before)


@pytest.mark.parametrize(
    "weight,bias,message",
    [
        (torch.zeros(6, 7), None, r"x is \[3, 8\], weight \[6, 7\]"),
        (torch.zeros(6, 8).half(), None, "weight torch.float16"),
        (torch.zeros(6, 8), torch.zeros(5), r"bias is \[5\]; wanted \[6\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(weight: torch.Tensor, bias: torch.Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        linear(torch.zeros(3, 8), weight, bias)
