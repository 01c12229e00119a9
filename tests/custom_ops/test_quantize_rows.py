"""lamina::quantize_rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import ShapeError
from lamina.custom_ops import quantize_rows
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8

from .quantized import apart

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    num_tokens=st.integers(0, 5),
    columns=st.integers(1, 300),
    group=st.sampled_from([0, 128]),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-20, 4),
    seed=st.integers(0, 999),
)
def test_the_largest_of_a_group_becomes_448_and_all_others_the_nearest_step(
    num_tokens: int, columns: int, group: int, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = apart((torch.randn(num_tokens, columns, generator=generator) * 2.0**exponent).to(dtype))
    values, scale = quantize_rows(x, group, FP8)
    assert values.dtype == torch.float8_e4m3fn
    assert values.is_contiguous()
    width = group or columns
    for first in range(0, columns, width):
        part, whole = values[:, first : first + width].float(), x[:, first : first + width].float()
        own = scale[:, first // width] if group else scale
        assert torch.equal(own, whole.abs().amax(dim=1).clamp_min(2.0**-126) / 448)
        assert torch.equal(part.abs().amax(dim=1) == 448, whole.abs().amax(dim=1) >= 2.0**-126)
        step = torch.maximum(part.abs() / 16, torch.tensor(2.0**-10))  # half of a unit in the last place
        assert ((whole / own[:, None] - part).abs() <= step).all()


@pytest.mark.parametrize("group", [0, 128])
def test_what_is_no_number_stays_none_in_its_own_group_alone(group: int) -> None:
    x = torch.ones(4, 256)
    x[1, 3], x[2, 200] = torch.nan, torch.inf
    values, _ = quantize_rows(x, group, FP8)
    broken = values.float().isnan()
    assert not broken[[0, 3]].any()
    assert broken[[1, 2], [3, 200]].all()
    assert not group or (not broken[1, 128:].any() and not broken[2, :128].any())


def test_zeros_and_the_smallest_numbers_have_a_scale() -> None:
    x = torch.zeros(2, 8)
    x[1] = 2.0**-149
    values, scale = quantize_rows(x, 0, FP8)
    assert (scale > 0).all()
    assert torch.equal(values.float(), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("group, kept", [(0, FP8), (128, FP8), (0, INT8)])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_opcheck(dtype: torch.dtype, group: int, kept: torch.dtype, num_tokens: int) -> None:
    x = torch.randn(num_tokens, 200).to(dtype)
    torch.library.opcheck(torch.ops.lamina.quantize_rows.default, (x, group, kept))


@given(
    num_tokens=st.integers(0, 5),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-20, 4),
    seed=st.integers(0, 999),
)
def test_the_largest_of_a_row_becomes_127_and_all_others_the_nearest_whole_number(
    num_tokens: int, columns: int, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = apart((torch.randn(num_tokens, columns, generator=generator) * 2.0**exponent).to(dtype))
    values, scale = quantize_rows(x, 0, INT8)
    peak = x.float().abs().amax(dim=1)
    assert values.dtype == torch.int8
    assert torch.equal(scale, peak.clamp_min(2.0**-126) / 127)
    assert torch.equal(values.float().abs().amax(dim=1) == 127, peak >= 2.0**-126)
    assert ((x.float() / scale[:, None] - values).abs() <= 0.5).all()


def test_halves_go_to_the_even_neighbour_and_signs_do_not_matter() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
    values, scale = quantize_rows(x, 0, INT8)
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]
    assert scale.tolist() == [1.0]


def test_whole_numbers_of_what_is_none_are_0_by_a_scale_that_is_none() -> None:
    x = torch.ones(3, 8)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    values, scale = quantize_rows(x, 0, INT8)
    assert values[1:].eq(0).all()
    assert not scale[1:].isfinite().any()
    assert (values[0] == 127).all()


def test_other_formats_groups_and_shapes_are_refused() -> None:
    with pytest.raises(
        ShapeError, match=r"dtype is torch\.uint8; wanted torch\.float8_e4m3fn or torch\.int8"
    ):
        quantize_rows(torch.zeros(2, 8), 0, torch.uint8)
    with pytest.raises(ShapeError, match=r"group is 128; wanted 0, a scale a row in torch\.int8"):
        quantize_rows(torch.zeros(2, 8), 128, INT8)
    with pytest.raises(ShapeError, match="group is 64"):
        quantize_rows(torch.zeros(2, 8), 64, FP8)
    for shape in ((2, 0), (3,), (1, 2, 3)):
        with pytest.raises(ShapeError, match="x is"):
            quantize_rows(torch.zeros(shape), 0, FP8)
