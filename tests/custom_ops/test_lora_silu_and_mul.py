"""lamina::lora_silu_and_mul."""

from dataclasses import replace

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import lora, lora_silu_and_mul, silu_and_mul
from lamina.custom_ops._shared import registry

from .test_lora import DTYPES, operands

OP = "lora_silu_and_mul"
PROVIDERS = [name for name in registry.providers(OP) if registry.runs_on(OP, name, "cpu")]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("rows", [(20, 20), (40,), (10, 10, 20)], ids=str)
def test_it_has_the_bits_of_both_ops(provider: str, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    given = operands(7, 33, rows, dtype).each()
    call = registry.select(OP, device=torch.device("cpu"), dtype=dtype, provider=provider).call
    of_lora = registry.select("lora", device=torch.device("cpu"), dtype=dtype, provider="reference").call
    sum_of = of_lora if provider == "reference" else lora
    assert torch.equal(call(*given), silu_and_mul(sum_of(*given)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_opcheck(dtype: torch.dtype, num_tokens: int) -> None:
    given = operands(num_tokens, 8, (4, 4), dtype).each()
    torch.library.opcheck(torch.ops.lamina.lora_silu_and_mul.default, given)


def test_what_does_not_fit_is_refused() -> None:
    given = operands(3, 8, (4, 3), torch.float32)
    with pytest.raises(ShapeError, match="lora_silu_and_mul: y is \\[3, 7\\]; wanted an even number"):
        lora_silu_and_mul(*given.each())
    with pytest.raises(ShapeError, match="lora_silu_and_mul: rows is \\[4, 4\\]"):
        lora_silu_and_mul(*replace(given, rows=(4, 4)).each())
