"""lamina::scaled_linear."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import scaled_linear
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8
from lamina.custom_ops.quantize_rows.reference import quantize_rows

from .quantized import CHECKS, check, every_kind, weights


def operands(
    num_tokens: int,
    columns: int,
    rows: int,
    dtype: torch.dtype,
    *,
    grouped: bool = False,
    bias: bool = True,
    kept: torch.dtype = FP8,
) -> tuple[Any, ...]:
    """The arguments of the op."""
    weight, scale = weights(rows, columns, grouped=grouped, dtype=kept)
    generator = torch.Generator().manual_seed(columns)
    rows_of_x = torch.randn(num_tokens, columns, generator=generator)
    x, x_scale = quantize_rows(rows_of_x, 128 if grouped else 0, kept)
    added = torch.randn(rows, generator=generator).to(dtype) if bias else None
    return x, x_scale, weight, scale, added, dtype


def dequantized(values: Tensor, scale: Tensor) -> Tensor:
    """In float64."""
    own = scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(128, 1)[:, : values.shape[1]]
    return values.double() * own.double()


@given(
    num_tokens=st.integers(0, 20),
    columns=st.integers(1, 300),
    rows=st.integers(1, 40),
    kind=st.sampled_from([(FP8, False), (FP8, True), (INT8, False)]),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_it_is_the_product_of_what_values_and_scales_stand_for(
    num_tokens: int, columns: int, rows: int, kind: tuple[torch.dtype, bool], bias: bool, dtype: torch.dtype
) -> None:
    kept, grouped = kind
    given_ = operands(num_tokens, columns, rows, dtype, grouped=grouped, bias=bias, kept=kept)
    x, x_scale, weight, scale, added, _ = given_
    left, right = dequantized(x, x_scale), dequantized(weight, scale)
    more = torch.zeros(rows) if added is None else added
    result = scaled_linear(*given_)
    assert result.dtype == dtype
    check(result, left @ right.T + more.double(), left.abs() @ right.abs().T + more.double().abs())


@every_kind
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_opcheck(dtype: torch.dtype, grouped: bool, num_tokens: int) -> None:
    given_ = operands(num_tokens, 200, 6, torch.bfloat16, grouped=grouped, kept=dtype)
    torch.library.opcheck(torch.ops.lamina.scaled_linear.default, given_, test_utils=CHECKS)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": torch.zeros(3, 8)}, "x is torch.float32"),
        ({"x_scale": torch.zeros(2)}, r"x_scale is \[2\]; wanted \[3\]"),
        ({"scale": torch.zeros(6, 1)}, r"x_scale is \[3\]; wanted \[3, 1\]"),
        (
            {"x": torch.zeros(3, 8, dtype=torch.int8)},
            "x is torch.int8, .*weight's torch.float8",
        ),
        ({"scale": torch.zeros(5)}, r"scale is \[5\]; wanted \[6\] or \[6, 1\]"),
        ({"bias": torch.zeros(6)}, "bias is torch.float32; wanted the result's torch.bfloat16"),
        ({"weight": torch.zeros(6, 8, dtype=torch.bfloat16)}, "weight is torch.bfloat16"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    names = ("x", "x_scale", "weight", "scale", "bias", "dtype")
    fitting = dict(zip(names, operands(3, 8, 6, torch.bfloat16, grouped=False), strict=True))
    with pytest.raises(ShapeError, match=message):
        scaled_linear(**fitting | change)


def test_sums_of_whole_numbers_are_exact_before_they_are_scaled() -> None:
    """Of more columns than float32 could sum up in order without a rounding."""
    x, weight = torch.full((1, 5000), 127, dtype=INT8), torch.full((2, 5000), 127, dtype=INT8)
    weight[1, 0] = 126
    result = scaled_linear(x, torch.ones(1), weight, torch.ones(2), None, torch.float32)
    exact = torch.tensor([[5000 * 127 * 127, 5000 * 127 * 127 - 127]], dtype=torch.float64)
    assert torch.equal(result, exact.float())
    with pytest.raises(ShapeError, match=r"scale is \[2, 40\]; wanted \[2\]"):
        scaled_linear(x, torch.ones(1, 40), weight, torch.ones(2, 40), None, torch.float32)
