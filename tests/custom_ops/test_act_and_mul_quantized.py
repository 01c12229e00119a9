"""lamina::act_and_mul_quantized."""

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import act_and_mul_quantized, gelu_and_mul, quantize_rows, silu_and_mul
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group, kept", [(0, FP8), (128, FP8), (0, INT8)])
@pytest.mark.parametrize("gelu", [False, True])
def test_it_is_the_gate_rounded_and_then_quantized(
    dtype: torch.dtype, group: int, kept: torch.dtype, gelu: bool
) -> None:
    gate_up = (torch.randn(5, 400) * 3).to(dtype)
    wanted = quantize_rows(gelu_and_mul(gate_up) if gelu else silu_and_mul(gate_up), group, kept)
    for part, right in zip(act_and_mul_quantized(gate_up, gelu, group, kept), wanted, strict=True):
        assert torch.equal(part.float(), right.float())
    torch.library.opcheck(torch.ops.lamina.act_and_mul_quantized.default, (gate_up, gelu, group, kept))


def test_what_does_not_fit_is_refused() -> None:
    for shape, group, kept in ((2, 7), 0, FP8), ((2, 8), 4, FP8), ((8,), 0, FP8), ((2, 8), 128, INT8):
        with pytest.raises(ShapeError, match="act_and_mul_quantized"):
            act_and_mul_quantized(torch.zeros(shape), False, group, kept)
