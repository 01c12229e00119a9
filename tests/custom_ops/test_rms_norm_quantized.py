"""lamina::rms_norm_quantized."""

from typing import Any

import pytest
import torch

from lamina import custom_ops
from lamina.common.errors import ShapeError
from lamina.custom_ops import quantize_rows, rms_norm_quantized
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group, kept", [(0, FP8), (128, FP8), (0, INT8)])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_it_is_the_norm_rounded_and_then_quantized(
    dtype: torch.dtype, group: int, kept: torch.dtype, zero_centred: bool
) -> None:
    x, weight = (torch.randn(5, 200) * 3).to(dtype), torch.randn(200).to(dtype)
    norm: Any = custom_ops.zero_centred_rms_norm if zero_centred else custom_ops.rms_norm
    wanted = quantize_rows(norm(x, weight, 1e-5), group, kept)
    given_ = x, weight, 1e-5, group, kept, zero_centred
    for part, right in zip(rms_norm_quantized(*given_), wanted, strict=True):
        assert torch.equal(part.float(), right.float())
    torch.library.opcheck(torch.ops.lamina.rms_norm_quantized.default, given_)


def test_what_does_not_fit_is_refused() -> None:
    for x, weight, group, kept in (
        *(((2, 8), 7, 0, FP8), ((2, 8), 8, 4, FP8), ((8,), 8, 0, FP8)),
        *(((2, 8), 8, 128, INT8), ((2, 8), 8, 0, torch.uint8)),
    ):
        with pytest.raises(ShapeError, match="rms_norm_quantized"):
            rms_norm_quantized(torch.zeros(x), torch.zeros(weight), 1e-5, group, kept)
