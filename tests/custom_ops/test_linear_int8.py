"""lamina::linear_int8."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import linear_int8
from lamina.custom_ops.linear.choices import Method
from lamina.custom_ops.linear_int8 import _cpu
from lamina.custom_ops.linear_int8.reference import linear_int8 as formula

from .guarded import at_the_end, making_ended
from .quantized import check as check_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# What a register of bytes holds, what a tile or a group of rows takes, and one less and one more.
TOKENS = st.sampled_from([1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 49, 80, 130])
FEATURES = st.integers(1, 70) | st.sampled_from([127, 128, 129, 192, 576])


def operands(
    num_tokens: int, columns: int, rows: int, dtype: torch.dtype, *, bias: bool = True, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, of rows that lie apart with NaN between them, weight, scale, bias."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((num_tokens, columns + 5), torch.nan, dtype=dtype)
    x = wide[:, 2 : columns + 2]
    x.copy_(torch.randn(x.shape, generator=generator))
    weight = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
    scale = torch.rand(rows, generator=generator) * 0.01 + 1e-3
    return x, weight, scale, torch.randn(rows, generator=generator).to(dtype) if bias else None


def check(result: Tensor, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """Rounded once from a sum that is as good as sums in float32 are."""
    exact = formula(x.double(), weight, scale, None if bias is None else bias.double())
    sizes = formula(x.double().abs(), weight.abs(), scale, None if bias is None else bias.double().abs())
    check_sum(result, exact, sizes)


WAYS = [(None, dtype) for dtype in DTYPES] + [(Method.DOT, dtype) for dtype in DTYPES]


@pytest.mark.parametrize("method, dtype", [*WAYS, (Method.AMX, torch.bfloat16)], ids=str)
@given(num_tokens=TOKENS, columns=FEATURES, rows=FEATURES, bias=st.booleans(), seed=st.integers(0, 99))
def test_it_is_the_product_of_the_dequantized_weights_rounded_once(
    method: Method | None, dtype: torch.dtype, num_tokens: int, columns: int, rows: int, bias: bool, seed: int
) -> None:
    """By the formula, and by each way of the kernel that this CPU has."""
    if method == Method.AMX and not _cpu.has_amx():
        pytest.skip("no AMX")
    given_ = operands(num_tokens, columns, rows, dtype, bias=bias, seed=seed)
    result = formula(*given_) if method is None else _cpu.launch(*given_, method)
    assert result.shape == (num_tokens, rows)
    assert result.dtype == dtype
    assert result.is_contiguous()
    check(result, *given_)


@pytest.mark.parametrize("num_tokens", [1, 20, 40, 70, 100])
@pytest.mark.parametrize("shape", [(33, 100), (16, 64), (70, 9000)], ids=str)
def test_nothing_is_read_beyond_its_end(num_tokens: int, shape: tuple[int, int]) -> None:
    """Also of more tokens than are multiplied at once, and more columns than are widened at once."""
    rows, columns = shape
    x, weight, scale, bias = operands(num_tokens, columns, rows, torch.bfloat16)
    assert bias is not None
    for method in (Method.DOT, Method.AMX) if _cpu.has_amx() else (Method.DOT,):
        result = _cpu.launch(making_ended(x), *map(at_the_end, (weight, scale, bias)), method)
        check(result, x, weight, scale, bias)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_opcheck(dtype: torch.dtype, num_tokens: int) -> None:
    torch.library.opcheck(torch.ops.lamina.linear_int8.default, operands(num_tokens, 8, 6, dtype))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_call_gives_the_same_bits_on_any_number_of_threads(threads: int) -> None:
    given_ = operands(20, 576, 960, torch.bfloat16)
    before, first = torch.get_num_threads(), linear_int8(*given_)
    try:
        torch.set_num_threads(threads)
        assert all(torch.equal(linear_int8(*given_), first) for _ in range(3))
    finally:
        torch.set_num_threads(before)


def test_torchs_own_gemms_do_not_notice_that_it_ran_between_them() -> None:
    """Both may use AMX, whose tile configuration torch keeps from call to call."""
    x, weight, scale, _ = operands(40, 576, 960, torch.bfloat16)
    dense = weight.bfloat16()
    x = x.contiguous()
    ours, torchs = linear_int8(x, weight, scale), F.linear(x, dense)
    for _ in range(5):
        assert torch.equal(linear_int8(x, weight, scale), ours)
        assert torch.equal(F.linear(x, dense), torchs)


def test_every_value_of_a_byte_counts_as_itself() -> None:
    """Also those next to the edges of the tables by which bytes become floats."""
    weight = torch.arange(-127, 128, dtype=torch.int8)[:, None].repeat(1, 64)
    for num_tokens in (1, 20):
        x = torch.zeros(num_tokens, 64, dtype=torch.bfloat16)
        x[:, 37] = 1.0
        result = linear_int8(x, weight, torch.ones(255))
        assert torch.equal(result, weight[:, 37].bfloat16().expand(num_tokens, 255))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": torch.zeros(3, 7)}, r"x is \[3, 7\], weight \[6, 8\]"),
        ({"weight": torch.zeros(6, 8)}, "weight is torch.float32, scale torch.float32"),
        ({"scale": torch.ones(6).bfloat16()}, "scale torch.bfloat16"),
        ({"scale": torch.ones(5)}, r"scale is \[5\]"),
        ({"bias": torch.zeros(5)}, r"bias \[5\]; wanted \[6\]"),
        ({"bias": torch.zeros(6).half()}, "bias is torch.float16; wanted x's torch.float32"),
        ({"weight": torch.zeros(8, 6, dtype=torch.int8).T}, "wanted a contiguous weight"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    fitting = dict(zip(("x", "weight", "scale", "bias"), operands(3, 8, 6, torch.float32), strict=True))
    with pytest.raises(ShapeError, match=message):
        linear_int8(**fitting | change)
