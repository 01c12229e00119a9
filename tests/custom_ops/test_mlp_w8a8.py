"""lamina::mlp_w8a8."""

import pytest
import torch
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import act_and_mul_quantized, mlp_w8a8, quantize_rows, scaled_linear
from lamina.custom_ops._shared import registry
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8

from . import quantized

HIDDEN, INNER = 144, 200


def operands(num_rows: int, group: int, kept: torch.dtype, dtype: torch.dtype) -> list[Tensor | None]:
    """x with its scale, then weights, scales and biases of both projections."""
    grouped = group > 0
    x = quantize_rows(torch.randn(num_rows, HIDDEN), group, kept)
    first = quantized.weights(2 * INNER, HIDDEN, grouped=grouped, dtype=kept)
    down = quantized.weights(HIDDEN, INNER, grouped=grouped, dtype=kept)
    return [*x, *first, torch.randn(2 * INNER).to(dtype), *down, torch.randn(HIDDEN).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group, kept", [(0, FP8), (128, FP8), (0, INT8)])
@pytest.mark.parametrize("provider", ["composed", "reference"])
def test_it_is_what_the_three_ops_give(
    provider: str, group: int, kept: torch.dtype, dtype: torch.dtype
) -> None:
    for num_rows in (0, 1, 5):
        given = operands(num_rows, group, kept, dtype)
        gated = act_and_mul_quantized(scaled_linear(*given[:5], dtype), False, group, kept)  # type: ignore[arg-type]
        wanted = scaled_linear(*gated, *given[5:], dtype)  # type: ignore[arg-type]
        call = registry.select("mlp_w8a8", device=torch.device("cpu"), dtype=kept, provider=provider).call
        assert call(*given, dtype).dtype == dtype
        torch.testing.assert_close(call(*given, dtype), wanted, rtol=2**-6, atol=2**-6)
    torch.library.opcheck(torch.ops.lamina.mlp_w8a8.default, (*given, dtype), test_utils=quantized.CHECKS)


def test_what_does_not_fit_is_refused() -> None:
    given = operands(2, 0, FP8, torch.float32)
    wrong = {
        0: [given[0].float(), given[0][:, :-1]],  # type: ignore[index, union-attr]
        1: [given[1].double(), given[1][:1]],  # type: ignore[index, union-attr]
        2: [given[2][1:]],  # type: ignore[index]
        5: [given[5][:, 1:], given[5].view(torch.int8)],  # type: ignore[index, union-attr]
        6: [given[6][:, None].expand(-1, 2).contiguous()],  # type: ignore[index]
        7: [torch.zeros(HIDDEN, dtype=torch.bfloat16)],
    }
    for place, parts in wrong.items():
        for part in parts:
            with pytest.raises(ShapeError, match="mlp_w8a8"):
                mlp_w8a8(*given[:place], part, *given[place + 1 :], torch.float32)  # type: ignore[arg-type]
