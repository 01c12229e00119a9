"""lamina::add_rms_norm_quantized."""

from typing import Any

import pytest
import torch

from lamina import custom_ops
from lamina.common.errors import ShapeError
from lamina.custom_ops import add_rms_norm_quantized, quantize_rows
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group, kept", [(0, FP8), (128, FP8), (0, INT8)])
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("unrounded", [False, True])
def test_it_is_the_norm_rounded_and_then_quantized_and_the_sum(
    dtype: torch.dtype, group: int, kept: torch.dtype, zero_centred: bool, unrounded: bool
) -> None:
    x, residual = ((torch.randn(5, 200) * 3).to(dtype) for _ in range(2))
    weight = torch.randn(200).to(dtype)
    norm: Any = custom_ops.add_zero_centred_rms_norm if zero_centred else custom_ops.add_rms_norm
    normed, total = norm(x, residual, weight, 1e-5, unrounded)
    given_ = x, residual, weight, 1e-5, group, kept, zero_centred, unrounded
    wanted = *quantize_rows(normed, group, kept), total
    for part, right in zip(add_rms_norm_quantized(*given_), wanted, strict=True):
        assert torch.equal(part.float(), right.float())
    torch.library.opcheck(torch.ops.lamina.add_rms_norm_quantized.default, given_)


def test_what_does_not_fit_is_refused() -> None:
    for shape, other, group, kept in (
        *(((2, 8), (2, 7), 0, FP8), ((2, 8), (2, 8), 4, FP8), ((8,), (8,), 0, FP8)),
        *(((2, 8), (2, 8), 128, INT8), ((2, 8), (2, 8), 0, torch.uint8)),
    ):
        with pytest.raises(ShapeError, match="add_rms_norm_quantized"):
            add_rms_norm_quantized(torch.zeros(shape), torch.zeros(other), torch.zeros(8), 1e-5, group, kept)
