"""lamina::lora_add_rms_norm."""

from typing import Any

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import add_rms_norm, lora, lora_add_rms_norm
from lamina.custom_ops._shared import registry

from .test_lora import DTYPES, operands

OP, EPS = "lora_add_rms_norm", 1e-5
PROVIDERS = [name for name in registry.providers(OP) if registry.runs_on(OP, name, "cpu")]


def arguments(num_tokens: int, rows: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    width = sum(rows)
    residual, weight = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((num_tokens, width), (width,))
    )
    return *operands(num_tokens, 33, rows, dtype).each(), residual, weight, EPS


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("rows", [(40,), (10, 30)], ids=str)
def test_it_has_the_bits_of_both_ops(provider: str, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    *given, residual, weight, eps = arguments(7, rows, dtype)
    call = registry.select(OP, device=torch.device("cpu"), dtype=dtype, provider=provider).call
    of_lora = registry.select("lora", device=torch.device("cpu"), dtype=dtype, provider="reference").call
    sum_of = of_lora if provider == "reference" else lora
    found = call(*given, residual, weight, eps)
    wanted = add_rms_norm(sum_of(*given), residual, weight, eps)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_opcheck(dtype: torch.dtype, num_tokens: int) -> None:
    torch.library.opcheck(torch.ops.lamina.lora_add_rms_norm.default, arguments(num_tokens, (8,), dtype))


def test_what_does_not_fit_is_refused() -> None:
    *given, residual, weight, eps = arguments(3, (8,), torch.float32)
    with pytest.raises(ShapeError, match="lora_add_rms_norm: residual is \\[2, 8\\]"):
        lora_add_rms_norm(*given, residual[1:], weight, eps)
    with pytest.raises(ShapeError, match="lora_add_rms_norm: weight is"):
        lora_add_rms_norm(*given, residual, weight[1:], eps)
    with pytest.raises(ShapeError, match=r"lora_add_rms_norm: x is torch\.float64"):
        lora_add_rms_norm(given[0], given[1].double(), *given[2:], residual, weight, eps)
