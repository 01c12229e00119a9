"""lamina::linear_w4a16."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import linear_w4a16
from lamina.custom_ops.linear.choices import Method
from lamina.custom_ops.linear_w4a16 import _cpu, layout
from lamina.custom_ops.linear_w4a16.op import num_groups
from lamina.custom_ops.linear_w4a16.reference import dequantize
from lamina.custom_ops.linear_w4a16.reference import linear_w4a16 as formula

from .guarded import at_the_end, making_ended
from .quantized import check as check_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# What is looked up in registers, what a tile or a group of rows takes, and one less and one more.
TOKENS = st.sampled_from([1, 2, 3, 4, 5, 15, 16, 17, 33, 80])
ROWS = st.integers(1, 40) | st.sampled_from([63, 64, 65, 130])
COLUMNS = st.sampled_from([2, 6, 30, 32, 34, 62, 64, 126, 128, 130, 192, 576])
GROUPS = st.sampled_from([-1, 2, 6, 32, 64, 96, 128, 1000])
Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int]


every_width = pytest.mark.parametrize("bits", [4, 8])


def numbers(rows: int, columns: int, bits: int, generator: torch.Generator) -> Tensor:
    """Random weights, as the op takes them."""
    size = rows, columns * bits // 8
    weight = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return weight if bits == 4 else weight.view(torch.int8)


def operands(
    num_tokens: int,
    columns: int,
    rows: int,
    dtype: torch.dtype,
    *,
    group: int = 32,
    zero: bool = True,
    bias: bool = True,
    seed: int = 0,
    bits: int = 4,
) -> Operands:
    """x, of rows that lie apart with NaN between them, weight, scale, zero, bias, group."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((num_tokens, columns + 5), torch.nan, dtype=dtype)
    x = wide[:, 2 : columns + 2]
    x.copy_(torch.randn(x.shape, generator=generator))
    shape = rows, num_groups(columns, group)
    weight = numbers(rows, columns, bits, generator)
    scale = (torch.rand(shape, generator=generator) * 0.1 + 1e-3).to(dtype)
    zeros = (torch.randn(shape, generator=generator) * 0.3).to(dtype)
    biases = torch.randn(rows, generator=generator).to(dtype)
    return x, weight, scale, zeros if zero else None, biases if bias else None, group


def check(result: Tensor, given_: Operands) -> None:
    """Rounded once from a sum of the dequantized weights that is as good as sums in float32 are."""
    x, weight, scale, zero, bias, group = given_
    dense = dequantize(weight, scale, zero, group).double()
    exact, sizes = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    check_sum(result, exact, sizes)


WAYS = [(None, dtype) for dtype in DTYPES] + [(Method.DOT, dtype) for dtype in DTYPES]


@pytest.mark.parametrize("method, dtype", [*WAYS, (Method.AMX, torch.bfloat16)], ids=str)
@given(
    num_tokens=TOKENS,
    columns=COLUMNS,
    rows=ROWS,
    group=GROUPS,
    zero=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_the_product_of_the_dequantized_weights_rounded_once(
    method: Method | None,
    dtype: torch.dtype,
    num_tokens: int,
    columns: int,
    rows: int,
    group: int,
    zero: bool,
    bias: bool,
    seed: int,
) -> None:
    """By the formula, and by each way of the kernel that this CPU has."""
    if method == Method.AMX and not _cpu.has_amx():
        pytest.skip("no AMX")
    given_ = operands(num_tokens, columns, rows, dtype, group=group, zero=zero, bias=bias, seed=seed)
    result = formula(*given_) if method is None else _cpu.launch(*given_, method)
    assert result.shape == (num_tokens, rows)
    assert result.dtype == dtype
    assert result.is_contiguous()
    check(result, given_)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_eight_bits_are_their_numbers_by_scale_with_zero_added_rounded_once(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.arange(-128, 128, dtype=torch.int8).repeat(9, 1)
    scale, zero = (torch.randn(9, 1, generator=generator).to(dtype) for _ in range(2))
    exact = [
        [q * Fraction(s) + Fraction(z) for q in range(-128, 128)]
        for s, z in zip(scale[:, 0].tolist(), zero[:, 0].tolist(), strict=True)
    ]
    right = torch.tensor([[float(value) for value in row] for row in exact], dtype=torch.float64).to(dtype)
    assert torch.equal(dequantize(weight, scale, zero, -1), right)
    x = torch.randn(3, 256, generator=generator).to(dtype) / 16
    check(linear_w4a16(x, weight, scale, zero, None, -1), (x, weight, scale, zero, None, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_four_bits_less_eight_times_scale_with_zero_added_rounded_once(
    dtype: torch.dtype,
) -> None:
    """Every value of four bits, as exact fractions say."""
    generator = torch.Generator().manual_seed(3)
    weight = layout.pack(torch.arange(16, dtype=torch.uint8).repeat(30, 1))
    scale, zero = (torch.randn(30, 1, generator=generator).to(dtype) for _ in range(2))
    exact = [
        [(q - 8) * Fraction(s) + Fraction(z) for q in range(16)]
        for s, z in zip(scale[:, 0].tolist(), zero[:, 0].tolist(), strict=True)
    ]
    right = torch.tensor([[float(value) for value in row] for row in exact], dtype=torch.float64).to(dtype)
    assert torch.equal(dequantize(weight, scale, zero, -1), right)
    for num_tokens in (1, 3, 20):  # looked up in registers, and written out
        one = torch.zeros(num_tokens, 16, dtype=dtype)
        one[:, 5] = 1.0
        assert torch.equal(
            linear_w4a16(one, weight, scale, zero, None, -1), right[:, 5].expand(num_tokens, 30)
        )


@pytest.mark.parametrize("num_tokens", [1, 4, 20, 70])
@pytest.mark.parametrize("shape", [(33, 100), (16, 64), (70, 2080)], ids=str)
def test_nothing_is_read_beyond_its_end(num_tokens: int, shape: tuple[int, int]) -> None:
    rows, columns = shape
    for group in (32, -1):
        given_ = operands(num_tokens, columns, rows, torch.bfloat16, group=group)
        x, weight, scale, zero, bias, _ = given_
        assert zero is not None
        assert bias is not None
        ended = map(at_the_end, (weight, scale, zero, bias))
        for method in (Method.DOT, Method.AMX) if _cpu.has_amx() else (Method.DOT,):
            check(_cpu.launch(making_ended(x), *ended, group, method), given_)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_opcheck(dtype: torch.dtype, num_tokens: int) -> None:
    for bits, rest in ((4, ()), (4, (False, True)), (8, ()), (8, (False, True))):
        given_ = operands(num_tokens, 8, 6, dtype, group=4, bits=bits)
        torch.library.opcheck(torch.ops.lamina.linear_w4a16.default, (*given_, *rest))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_the_same_call_gives_the_same_bits_on_any_number_of_threads(threads: int, num_tokens: int) -> None:
    given_ = operands(num_tokens, 576, 960, torch.bfloat16)
    before, first = torch.get_num_threads(), linear_w4a16(*given_)
    try:
        torch.set_num_threads(threads)
        assert all(torch.equal(linear_w4a16(*given_), first) for _ in range(3))
    finally:
        torch.set_num_threads(before)


@every_width
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_what_is_shuffled_gives_what_it_gave(group: int, zero: bool, bits: int) -> None:
    x, weight, scale, zeros, bias, _ = operands(
        5, 320, 192, torch.bfloat16, group=group, zero=zero, bits=bits
    )
    wound = layout.shuffle(weight), layout.shuffle_groups(scale)
    wound_zeros = None if zeros is None else layout.shuffle_groups(zeros)
    plain = linear_w4a16(x, weight, scale, zeros, bias, group)
    assert torch.equal(linear_w4a16(x, *wound, wound_zeros, bias, group, True), plain)
    assert torch.equal(
        formula(x, *wound, wound_zeros, bias, group, True), formula(x, weight, scale, zeros, bias, group)
    )


@pytest.mark.parametrize("num_tokens, rows", [(0, 6), (3, 0), (0, 0)])
def test_nothing_gives_nothing_in_a_thread_that_has_not_multiplied_yet(num_tokens: int, rows: int) -> None:
    given_ = operands(num_tokens, 64, rows, torch.bfloat16)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(linear_w4a16, *given_).result().shape == (num_tokens, rows)


def test_with_a_gate_it_is_the_two_ops_one_after_another() -> None:
    for num_tokens in (1, 20):
        given_ = operands(num_tokens, 64, 48, torch.bfloat16)
        both = torch.ops.lamina.silu_and_mul.default(linear_w4a16(*given_))
        assert torch.equal(linear_w4a16(*given_, False, True), both)


@every_width
@given(
    tiles=st.tuples(st.integers(1, 3), st.integers(1, 3)), groups=st.integers(1, 5), seed=st.integers(0, 99)
)
def test_unshuffling_gives_back_what_was_shuffled(
    bits: int, tiles: tuple[int, int], groups: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (64 * count for count in tiles)
    weight = numbers(rows, columns, bits, generator)
    scale = torch.randn(rows, groups, generator=generator)
    assert torch.equal(layout.unshuffle(layout.shuffle(weight)), weight)
    assert torch.equal(layout.unshuffle_groups(layout.shuffle_groups(scale)), scale)


def test_a_shuffled_word_is_what_a_lane_gives_to_the_tensor_cores() -> None:
    """The layout said once more, weight by weight: m64k16 of WGMMA's left operand from registers."""
    q = torch.randint(0, 16, (128, 192), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    blob = layout.shuffle(layout.pack(q)).view(-1).view(2, 3, 4, 32, 4, 4)
    for tile, column_tile, warp, lane, step in [(0, 0, 0, 0, 0), (1, 2, 3, 31, 3), (1, 1, 2, 13, 1)]:
        word = int.from_bytes(bytes(blob[tile, column_tile, warp, lane, step].tolist()), "little")
        for register in range(4):
            row = 64 * tile + 16 * warp + lane // 4 + 8 * (register % 2)
            column = 64 * column_tile + 16 * step + 2 * (lane % 4) + 8 * (register // 2)
            pair = (word >> 4 * register) & 0x000F000F
            assert (pair & 15, pair >> 16) == (int(q[row, column]), int(q[row, column + 1]))
    scale = torch.arange(128.0 * 3).view(128, 3)
    tiles = layout.shuffle_groups(scale).view(2, 3, 4, 8, 2)
    assert tiles[1, 2, 3, 5].tolist() == [float(scale[64 + 48 + 5, 2]), float(scale[64 + 48 + 13, 2])]


def test_two_shuffled_words_of_bytes_are_what_a_lane_gives_to_the_tensor_cores() -> None:
    """The same of eight bits: register by register two neighbours, in every second byte of a word."""
    q = numbers(128, 192, 8, torch.Generator().manual_seed(2))
    blob = layout.shuffle(q).view(-1).view(2, 6, 4, 32, 2, 2, 4)
    for tile, half, warp, lane, step in [(0, 0, 0, 0, 0), (1, 5, 3, 31, 1), (1, 2, 2, 13, 1)]:
        for register in range(4):
            word = blob[tile, half, warp, lane, step, register // 2]
            row = 64 * tile + 16 * warp + lane // 4 + 8 * (register % 2)
            column = 32 * half + 16 * step + 2 * (lane % 4) + 8 * (register // 2)
            assert torch.equal(word[register % 2 :: 2], q[row, column : column + 2])


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": torch.zeros(3, 7)}, r"x is \[3, 7\], weight \[6, 4\]"),
        ({"weight": torch.zeros(6, 4)}, "weight is torch.float32; wanted torch.uint8"),
        ({"scale": torch.ones(6, 2).bfloat16()}, r"scale is torch.bfloat16 \[6, 2\]; wanted x's"),
        ({"scale": torch.ones(6, 3)}, r"scale is torch.float32 \[6, 3\]; wanted x's torch.float32 \[6, 2\]"),
        ({"zero": torch.ones(6, 1)}, r"zero is torch.float32 \[6, 1\]"),
        ({"bias": torch.zeros(5)}, r"bias is torch.float32 \[5\]; wanted x's torch.float32 \[6\]"),
        ({"weight": torch.zeros(4, 6, dtype=torch.uint8).T}, "weight is not contiguous"),
        ({"group": 3}, "group is 3; wanted an even number"),
        ({"group": 0}, "group is 0"),
        ({"shuffled": True}, r"\[6, 8\] is shuffled; wanted multiples of 64"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, object], message: str) -> None:
    names = "x", "weight", "scale", "zero", "bias", "group"
    fitting = dict(zip(names, operands(3, 8, 6, torch.float32, group=4), strict=True))
    with pytest.raises(ShapeError, match=message):
        linear_w4a16(**fitting | change)  # type: ignore[arg-type]


def test_a_gate_needs_as_many_rows_as_what_it_gates() -> None:
    with pytest.raises(ShapeError, match="weight has 5 rows"):
        linear_w4a16(*operands(3, 8, 5, torch.float32, group=4), False, True)
