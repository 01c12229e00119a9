"""lamina::paged_attention over a cache in FP8: what is read of it, and what is refused."""

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import paged_attention
from lamina.custom_ops._shared.fp8 import FP8

from .test_paged_attention import MakeCase, kernel


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_are_none_are_refused(make_paged_case: MakeCase, scale: float) -> None:
    for name in ("key_scale", "value_scale"):
        with pytest.raises(ShapeError, match="wanted finite numbers above 0"):
            paged_attention(*make_paged_case([5], [1], cache_dtype=FP8, **{name: scale}))


def test_one_cache_in_fp8_and_one_that_is_not_are_refused(make_paged_case: MakeCase) -> None:
    case = make_paged_case([5], [1], cache_dtype=FP8)
    with pytest.raises(ShapeError, match=r"caches torch\.float8_e4m3fn, torch\.float32"):
        paged_attention(*case._replace(value_cache=case.value_cache.float()))


def test_every_number_of_fp8_is_read_as_it_is(make_paged_case: MakeCase) -> None:
    """As values of one visible key each, whose weight is 1."""
    case = make_paged_case([1] * 16, [1] * 16, num_heads=2, num_kv_heads=1, head_dim=16, cache_dtype=FP8)
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).view(16, 16)
    case.value_cache[case.block_tables[:, 0].long(), 0, 0] = numbers
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        same = case._replace(query=case.query.to(dtype), out=case.out.to(dtype))
        for head in range(2):
            torch.testing.assert_close(
                kernel(same)[:, head], numbers.to(dtype), rtol=0, atol=0, equal_nan=True
            )


def test_opcheck_of_a_cache_in_fp8(make_paged_case: MakeCase) -> None:
    """As far as torch can compare tensors in FP8."""
    case = make_paged_case([5, 9, 0], [1, 4, 1], cache_dtype=FP8, key_scale=0.5)
    utilities = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.lamina.paged_attention.default, tuple(case), test_utils=utilities)
