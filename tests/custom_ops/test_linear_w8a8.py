"""lamina::linear_w8a8."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import linear_w8a8
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8
from lamina.custom_ops.linear_w8a8.reference import linear_w8a8 as formula
from lamina.custom_ops.quantize_rows.reference import quantize_rows
from lamina.custom_ops.scaled_linear import _cpu
from lamina.custom_ops.scaled_linear.reference import scaled_linear

from .guarded import at_the_end
from .quantized import CHECKS, KINDS, apart, check, weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = st.sampled_from([0, 1, 2, 3, 5, 8, 9, 17, 33, 70])
FEATURES = st.integers(1, 70) | st.sampled_from([127, 128, 129, 192, 576])
WAYS = {"few": _cpu.multiply_few, "blocks": _cpu.multiply_blocks}


def operands(
    num_tokens: int,
    columns: int,
    rows: int,
    dtype: torch.dtype,
    *,
    grouped: bool,
    bias: bool = True,
    kept: torch.dtype = FP8,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, of rows that lie apart, weight, scale, bias."""
    generator = torch.Generator().manual_seed(rows)
    x = apart(torch.randn(num_tokens, columns, generator=generator).to(dtype))
    added = torch.randn(rows, generator=generator).to(dtype) if bias else None
    return x, *weights(rows, columns, grouped=grouped, dtype=kept), added


@pytest.mark.parametrize("way, grouped", [("few", False), ("blocks", False), ("blocks", True)])
@given(
    num_tokens=TOKENS,
    columns=FEATURES,
    rows=FEATURES,
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_each_way_of_the_cpu_sums_in_float32_and_rounds_once(
    way: str, grouped: bool, num_tokens: int, columns: int, rows: int, bias: bool, dtype: torch.dtype
) -> None:
    x, weight, scale, added = operands(num_tokens, columns, rows, dtype, grouped=grouped, bias=bias)
    values, x_scale = quantize_rows(x, 128 if grouped else 0, FP8)
    result = WAYS[way](values, x_scale, weight, scale, added, dtype)
    more = torch.zeros(rows).double() if added is None else added.double()
    exact = scaled_linear(values, x_scale, weight, scale, more, torch.float64)
    sizes = (values.float().abs().to(FP8), x_scale, weight.float().abs().to(FP8), scale, more.abs())
    assert result.dtype == dtype
    assert result.is_contiguous()
    check(result, exact, scaled_linear(*sizes, torch.float64))


@pytest.mark.parametrize("num_tokens", [1, 8, 9])
@pytest.mark.parametrize("kept, grouped", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_is_its_formula(num_tokens: int, kept: torch.dtype, grouped: bool, dtype: torch.dtype) -> None:
    given_ = operands(num_tokens, 300, 33, dtype, grouped=grouped, kept=kept)
    torch.testing.assert_close(linear_w8a8(*given_), formula(*given_))


@pytest.mark.parametrize("kept, most", [(FP8, 0.04), (INT8, 0.015)])
def test_it_loses_no_more_than_both_roundings_do(kept: torch.dtype, most: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(16, 512), torch.randn(64, 512)
    result = linear_w8a8(x, *quantize_rows(weight, 0, kept))
    exact = x @ weight.T
    assert (result - exact).norm() < most * exact.norm()


def test_nothing_is_read_beyond_its_end() -> None:
    for rows, columns in ((33, 100), (16, 64), (7, 9000)):
        x, weight, scale, bias = operands(3, columns, rows, torch.bfloat16, grouped=False)
        values, x_scale = quantize_rows(x, 0, FP8)
        ended = [at_the_end(part) for part in (values, x_scale, weight, scale)]
        result = _cpu.multiply_few(*ended, at_the_end(bias), torch.bfloat16)  # type: ignore[arg-type]
        torch.testing.assert_close(result, formula(x, weight, scale, bias))
        assert torch.equal(_cpu.widened(ended[2], None), weight.float())
        of_groups = at_the_end(torch.rand(rows, -(-columns // 128)))
        widened = _cpu.widened(ended[2], of_groups)
        assert torch.equal(widened, weight.float() * of_groups.repeat_interleave(128, 1)[:, :columns])


def test_every_value_of_a_byte_counts_as_itself() -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(FP8)[:, None].repeat(1, 64)
    x = torch.zeros(1, 64)
    x[0, 37] = 448.0
    for multiply in WAYS.values():
        result = multiply(*quantize_rows(x, 0, FP8), weight, torch.ones(256) / 448, None, torch.float32)
        torch.testing.assert_close(result[0], weight[:, 37].float(), equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kept, grouped", KINDS)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_opcheck(dtype: torch.dtype, kept: torch.dtype, grouped: bool, num_tokens: int) -> None:
    given_ = operands(num_tokens, 200, 6, dtype, grouped=grouped, kept=kept)
    torch.library.opcheck(torch.ops.lamina.linear_w8a8.default, given_, test_utils=CHECKS)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": torch.zeros(3, 7)}, r"weight is \[6, 8\]; wanted \[out, 7\]"),
        ({"x": torch.zeros(3, 0)}, r"x is \[3, 0\]"),
        ({"weight": torch.zeros(6, 8)}, "weight is torch.float32, scale torch.float32"),
        ({"scale": torch.ones(6).bfloat16()}, "scale torch.bfloat16"),
        ({"scale": torch.ones(5)}, r"scale is \[5\]; wanted \[6\] or \[6, 1\]"),
        ({"bias": torch.zeros(5)}, r"bias is \[5\]; wanted \[6\]"),
        ({"bias": torch.zeros(6).half()}, "bias is torch.float16; wanted x's torch.float32"),
        ({"weight": torch.zeros(8, 6).to(FP8).T}, "wanted a contiguous weight"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    fitting = operands(3, 8, 6, torch.float32, grouped=False)
    named = dict(zip(("x", "weight", "scale", "bias"), fitting, strict=True))
    call: Callable[..., Tensor] = linear_w8a8
    with pytest.raises(ShapeError, match=message):
        call(**named | change)
