"""lamina::act_and_mul_quantized."""

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import act_and_mul_quantized, gelu_and_mul, quantize_rows, silu_and_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("gelu", [False, True])
def test_it_is_the_gate_rounded_and_then_quantized(dtype: torch.dtype, group: int, gelu: bool) -> None:
    gate_up = (torch.randn(5, 400) * 3).to(dtype)
    wanted = quantize_rows(gelu_and_mul(gate_up) if gelu else silu_and_mul(gate_up), group)
    for part, right in zip(act_and_mul_quantized(gate_up, gelu, group), wanted, strict=True):
        assert torch.equal(part.float(), right.float())
    torch.library.opcheck(torch.ops.lamina.act_and_mul_quantized.default, (gate_up, gelu, group))


def test_what_does_not_fit_is_refused() -> None:
    for shape, group in ((2, 7), 0), ((2, 8), 4), ((8,), 0):
        with pytest.raises(ShapeError, match="act_and_mul_quantized"):
            act_and_mul_quantized(torch.zeros(shape), False, group)
