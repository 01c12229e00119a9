"""lamina::rms_norm_quantized."""

from typing import Any

import pytest
import torch

from lamina import custom_ops
from lamina.common.errors import ShapeError
from lamina.custom_ops import quantize_rows, rms_norm_quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_it_is_the_norm_rounded_and_then_quantized(
    dtype: torch.dtype, group: int, zero_centred: bool
) -> None:
    x, weight = (torch.randn(5, 200) * 3).to(dtype), torch.randn(200).to(dtype)
    norm: Any = custom_ops.zero_centred_rms_norm if zero_centred else custom_ops.rms_norm
    wanted = quantize_rows(norm(x, weight, 1e-5), group)
    given_ = x, weight, 1e-5, group, zero_centred
    for part, right in zip(rms_norm_quantized(*given_), wanted, strict=True):
        assert torch.equal(part.float(), right.float())
    torch.library.opcheck(torch.ops.lamina.rms_norm_quantized.default, given_)


def test_what_does_not_fit_is_refused() -> None:
    for x, weight, group in ((2, 8), 7, 0), ((2, 8), 8, 4), ((8,), 8, 0):
        with pytest.raises(ShapeError, match="rms_norm_quantized"):
            rms_norm_quantized(torch.zeros(x), torch.zeros(weight), 1e-5, group)
