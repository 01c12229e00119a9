"""lamina::linear_blocks."""

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import linear_blocks
from lamina.custom_ops.linear_blocks import _cpu, layout
from lamina.custom_ops.linear_blocks.layout import KINDS
from lamina.custom_ops.linear_blocks.reference import linear_blocks as formula
from lamina.custom_ops.linear_blocks.reference import quantize

from .guarded import at_the_end, making_ended
from .quantized import check as check_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUM_ERROR = 4e-7  # of a sum of float32 of few terms, by the sum of their sizes
WAYS = {"formula": formula, "kernel": _cpu.linear_blocks}
every_kind = pytest.mark.parametrize("kind", KINDS)
# What a tile of rows takes, and one less and one more.
TOKENS = st.sampled_from([1, 2, 3, 7, 8, 9, 16, 23, 80])
ROWS = st.integers(1, 40) | st.sampled_from([64, 96])
Operands = tuple[Tensor, Tensor, Tensor | None, str]


def blocks_of(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    """Rows of any bits, whose scales and minimums are of the size of a model's."""
    generator = np.random.default_rng(seed)
    whole = generator.integers(
        0, 256, (rows, columns // KINDS[kind].columns, KINDS[kind].num_bytes), np.uint8
    )
    at = 0
    for size, unit in KINDS[kind].regions:
        if unit == 2:
            heads = generator.normal(scale=0.01, size=(*whole.shape[:2], size // 2)).astype(np.float16)
            whole[:, :, at : at + size] = heads.view(np.uint8)
        at += size
    return torch.from_numpy(whole.reshape(rows, whole.shape[1] * whole.shape[2]))


def operands(
    kind: str,
    num_tokens: int,
    rows: int,
    blocks: int,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    seed: int = 0,
) -> Operands:
    """x, of rows that lie apart with NaN between them, weight, bias, kind."""
    generator = torch.Generator().manual_seed(seed)
    columns = blocks * KINDS[kind].columns
    wide = torch.full((num_tokens, columns + 5), torch.nan, dtype=dtype)
    x = wide[:, 2 : columns + 2]
    x.copy_(torch.randn(x.shape, generator=generator))
    biases = torch.randn(rows, generator=generator).to(dtype)
    weight = layout.interleave(blocks_of(kind, rows, columns, seed), kind)
    return x, weight, biases if bias else None, kind


def dequantized(weight: Tensor, kind: str) -> Tensor:
    """What the gguf package makes of the rows, in float64."""
    rows = layout.by_rows(weight, kind).numpy()
    return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])).double()


def check(result: Tensor, given_: Operands) -> None:
    """Rounded once from the product of x as it is quantized and the dequantized weights."""
    x, weight, bias, kind = given_
    spans = quantize(x.to(torch.float32))
    taken = (torch.unflatten(spans.values, 1, (-1, 32)) * spans.scale.double()[:, :, None]).flatten(1)
    dense = dequantized(weight, kind)
    exact, sizes = taken @ dense.T, taken.abs() @ dense.abs().T
    minimum = KINDS[kind].numbers(layout.by_rows(weight, kind)).minimum
    if minimum is not None:  # its products are apart from the numbers', and may all but cancel them
        of_spans = torch.unflatten(taken, 1, (-1, 32)).sum(dim=2).abs()
        sizes += 2 * of_spans @ minimum.abs().double().T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    check_sum(result, exact, sizes, SUM_ERROR)


@every_kind
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 999))
def test_a_block_stands_for_what_the_gguf_package_makes_of_it(
    kind: str, rows: int, blocks: int, seed: int
) -> None:
    """Of bits that no quantization would write, too."""
    lying = blocks_of(kind, rows, blocks * KINDS[kind].columns, seed)
    exact = torch.from_numpy(gguf.dequantize(lying.numpy(), gguf.GGMLQuantizationType[kind]))
    assert torch.equal(KINDS[kind].numbers(lying).dense(), exact)


@every_kind
@given(rows=st.integers(0, 70), blocks=st.integers(1, 3), seed=st.integers(0, 99))
def test_rows_that_were_interleaved_come_apart_as_they_were(
    kind: str, rows: int, blocks: int, seed: int
) -> None:
    lying = blocks_of(kind, rows, blocks * KINDS[kind].columns, seed)
    in_groups = layout.interleave(lying, kind)
    assert in_groups.shape == lying.shape
    assert torch.equal(layout.by_rows(in_groups, kind), lying)
    in_place = lying.clone()
    layout.interleave_in_place(in_place, kind)
    assert torch.equal(in_place, in_groups)


def test_a_group_has_each_unit_of_all_its_rows_together() -> None:
    """The layout said once more, byte by byte."""
    lying = blocks_of("Q4_K", 33, 512, 5)
    blob = layout.interleave(lying, "Q4_K")
    assert torch.equal(blob[32], lying[32])  # left over
    group = blob[16:32].flatten()
    for block, row in [(0, 0), (1, 3), (1, 15)]:
        whole, part = 144 * block, group[16 * 144 * block :]
        assert part[2 * row] == lying[16 + row, whole]  # its scale
        assert part[32 + 2 * row + 1] == lying[16 + row, whole + 3]  # its minimum
        assert part[64 + 16 * 7 + row] == lying[16 + row, whole + 4 + 7]  # a byte of scales of six bits
        assert part[256 + 64 * 9 + 4 * row + 2] == lying[16 + row, whole + 16 + 4 * 9 + 2]  # two numbers


@pytest.mark.parametrize("way", WAYS)
@every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(num_tokens=TOKENS, rows=ROWS, blocks=st.integers(1, 5), bias=st.booleans(), seed=st.integers(0, 99))
def test_it_is_the_product_of_x_as_quantized_and_the_dequantized_weights_rounded_once(
    way: str, kind: str, dtype: torch.dtype, num_tokens: int, rows: int, blocks: int, bias: bool, seed: int
) -> None:
    given_ = operands(kind, num_tokens, rows, blocks, dtype, bias=bias, seed=seed)
    result = WAYS[way](*given_)
    assert result.shape == (num_tokens, rows)
    assert result.dtype == dtype
    assert result.is_contiguous()
    check(result, given_)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@given(
    exponent=st.integers(-130, 100),
    tokens=st.integers(1, 9),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 999),
)
def test_by_weights_of_one_it_is_x_as_it_is_quantized(
    kind: str, exponent: int, tokens: int, zeros: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 32, generator=generator)
    x[torch.rand(x.shape, generator=generator) < zeros] = 0.0
    x = x * 2.0**exponent
    lying = torch.zeros(32, KINDS[kind].num_bytes, dtype=torch.uint8)
    lying[:, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    for column in range(32):
        if kind == "Q8_0":
            lying[column, 2 + column] = 1
        else:
            lying[column, 4 + column % 16] = 16 if column >= 16 else 1
    assert torch.equal(KINDS[kind].numbers(lying).dense(), torch.eye(32))
    spans = quantize(x)
    found = linear_blocks(x, layout.interleave(lying, kind), None, kind)
    assert torch.equal(found, spans.values * spans.scale)


@given(
    values=st.lists(st.floats(-1.0, 1.0), min_size=32, max_size=32),
    exponent=st.integers(-140, 100),
)
def test_a_span_is_off_by_no_more_than_half_a_step(values: list[float], exponent: int) -> None:
    x = torch.tensor([values]) * 2.0**exponent
    spans = quantize(x)
    assert bool((spans.values.abs() <= 127).all())
    assert torch.equal(spans.values, spans.values.round())
    assert spans.scale[0, 0] == x.abs().max() / 127
    if float(x.abs().max()) >= 2.0**-120:
        off = (spans.values * spans.scale.double() - x).abs()
        assert bool((off <= spans.scale * 0.5001).all())
    else:
        assert not bool(spans.values.any())


@pytest.mark.parametrize("way", WAYS)
@every_kind
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_what_is_not_finite_is_none_and_others_are_as_they_were(
    way: str, kind: str, bad: float
) -> None:
    x, weight, bias, _ = operands(kind, 9, 20, 2, torch.float32)
    right = WAYS[way](x, weight, bias, kind)
    for row in (0, 5, 8):
        spoiled = x.clone()
        spoiled[row, row] = bad
        found = WAYS[way](spoiled, weight, bias, kind)
        assert bool(found[row].isnan().all())
        assert torch.equal(found[torch.arange(9) != row], right[torch.arange(9) != row])


@every_kind
@given(num_tokens=st.integers(1, 40), rows=ROWS, seed=st.integers(0, 99))
def test_a_row_has_the_bits_that_it_has_alone(kind: str, num_tokens: int, rows: int, seed: int) -> None:
    x, weight, bias, _ = operands(kind, num_tokens, rows, 2, torch.float32, seed=seed)
    together = linear_blocks(x, weight, bias, kind)
    for token in range(num_tokens):
        assert torch.equal(linear_blocks(x[token : token + 1], weight, bias, kind)[0], together[token])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_the_same_call_gives_the_same_bits_on_any_number_of_threads(threads: int, num_tokens: int) -> None:
    given_ = operands("Q4_1", num_tokens, 960, 18, torch.bfloat16)
    before, first = torch.get_num_threads(), linear_blocks(*given_)
    try:
        torch.set_num_threads(threads)
        assert all(torch.equal(linear_blocks(*given_), first) for _ in range(3))
    finally:
        torch.set_num_threads(before)


def test_more_rows_than_are_quantized_at_once_have_the_same_bits() -> None:
    x, weight, bias, kind = operands("Q8_0", 400, 16, 128, torch.float32)
    together = linear_blocks(x, weight, bias, kind)
    apart = torch.cat([linear_blocks(rows, weight, bias, kind) for rows in x.split(50)])
    assert torch.equal(together, apart)


@every_kind
@pytest.mark.parametrize("rows", [5, 16, 33])
def test_nothing_is_read_beyond_its_end(kind: str, rows: int) -> None:
    for num_tokens in (1, 10):
        given_ = operands(kind, num_tokens, rows, 1, torch.bfloat16)
        x, weight, bias, _ = given_
        assert bias is not None
        check(_cpu.linear_blocks(making_ended(x), at_the_end(weight), at_the_end(bias), kind), given_)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_opcheck(dtype: torch.dtype, num_tokens: int) -> None:
    given_ = operands("Q4_1", num_tokens, 6, 2, dtype)
    for rest in ((), (True,)):
        torch.library.opcheck(torch.ops.lamina.linear_blocks.default, (*given_, *rest))


@pytest.mark.parametrize("num_tokens, rows", [(0, 6), (3, 0), (0, 0)])
def test_nothing_gives_nothing_in_a_thread_that_has_not_multiplied_yet(num_tokens: int, rows: int) -> None:
    given_ = operands("Q4_0", num_tokens, rows, 1, torch.bfloat16)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(linear_blocks, *given_).result().shape == (num_tokens, rows)
    assert formula(*given_).shape == (num_tokens, rows)


@every_kind
@pytest.mark.parametrize("rows", [64, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_a_gate_it_is_the_two_ops_one_after_another(kind: str, rows: int, dtype: torch.dtype) -> None:
    """Where the gated rows begin amid a group too; but for what an ulp of exp does to float32."""
    for num_tokens in (1, 20):
        given_ = operands(kind, num_tokens, rows, 1, dtype)
        both = torch.ops.lamina.silu_and_mul.default(linear_blocks(*given_))
        found = linear_blocks(*given_, True)
        torch.testing.assert_close(found, both, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"kind": "Q5_0"}, "kind is 'Q5_0'; wanted Q4_0, Q4_1"),
        ({"x": torch.zeros(3, 48)}, r"x is \[3, 48\], weight \[6, 40\]; wanted .* of 32 columns"),
        ({"x": torch.zeros(3, 32)}, r"x is \[3, 32\], weight \[6, 40\]"),
        ({"weight": torch.zeros(6, 40)}, "weight is torch.float32; wanted torch.uint8"),
        ({"weight": torch.zeros(40, 6, dtype=torch.uint8).T}, "wanted torch.uint8, contiguous"),
        ({"bias": torch.zeros(5)}, r"bias is torch.float32 \[5\]; wanted x's torch.float32 \[6\]"),
        ({"bias": torch.zeros(6).bfloat16()}, r"bias is torch.bfloat16 \[6\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, object], message: str) -> None:
    names = "x", "weight", "bias", "kind"
    fitting = dict(zip(names, operands("Q4_1", 3, 6, 2, torch.float32), strict=True))
    with pytest.raises(ShapeError, match=message):
        linear_blocks(**fitting | change)  # type: ignore[arg-type]


def test_a_gate_needs_as_many_rows_as_what_it_gates() -> None:
    with pytest.raises(ShapeError, match="weight has 5 rows"):
        linear_blocks(*operands("Q4_1", 3, 5, 2, torch.float32), True)
