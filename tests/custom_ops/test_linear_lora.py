"""lamina::linear_lora."""

from typing import Any

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import linear, linear_lora, lora
from lamina.custom_ops._shared import registry
from lamina.custom_ops.linear.choices import MAX_SHARED, GemmConfig
from lamina.custom_ops.linear_lora._overlapped import MOST_ROOM, block_bytes, leave_room

from .test_lora import operands

CPU = torch.device("cpu")


def arguments(num_tokens: int, dtype: torch.dtype, *, bias: bool = True) -> tuple[Any, ...]:
    given = operands(num_tokens, 24, (6, 10), dtype, rank=3)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(16, 24, generator=generator).to(dtype)
    return given.x, weight, weight[:, 0].clone() if bias else None, *given.each()[2:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_it_is_the_two_ops_one_after_the_other(num_tokens: int, dtype: torch.dtype) -> None:
    for has_bias in (False, True):
        x, weight, bias, *adapters = arguments(num_tokens, dtype, bias=has_bias)
        found = linear_lora(x, weight, bias, *adapters)
        assert torch.equal(found, lora(linear(x, weight, bias), x, *adapters))


def test_every_provider_of_a_cpu_passes_torchs_checks() -> None:
    given = arguments(3, torch.float32)
    for name in registry.providers("linear_lora")[1:]:
        select = registry.select("linear_lora", device=CPU, dtype=torch.float32, provider=name)
        torch.testing.assert_close(select.call(*given), linear_lora(*given))
    torch.library.opcheck(torch.ops.lamina.linear_lora.default, given)


def test_what_is_no_projection_or_no_adapter_of_it_is_refused_in_its_name() -> None:
    x, weight, bias, *adapters = arguments(3, torch.float32)
    with pytest.raises(ShapeError, match="linear_lora: x is"):
        linear_lora(x, weight[:, 1:], bias, *adapters)
    with pytest.raises(ShapeError, match="linear_lora: rows is"):
        linear_lora(x, weight[1:], None, *adapters)


@pytest.mark.parametrize(
    ("config", "stages"),
    [
        (GemmConfig(1, 32, 1, 2, 9), 8),
        (GemmConfig(2, 32, 2, 1, 5), 4),
        (GemmConfig(1, 8, 1, 2, 12), 11),
        (GemmConfig(1, 8, 1, 1, 6), 5),  # two blocks a processor
        (GemmConfig(1, 32, 1, 2, 3), 3),  # which has room as it is
        (GemmConfig(4, 128, 1, 1, 2), 2),  # and never fewer than two
    ],
)
def test_a_gemm_gives_up_as_few_stages_as_leave_room(config: GemmConfig, stages: int) -> None:
    assert leave_room(config, MOST_ROOM) == config._replace(stages=stages)


def test_two_blocks_of_rank_16_find_room_and_none_of_a_rank_of_more_than_32() -> None:
    assert [MOST_ROOM // block_bytes(rank) for rank in (8, 16, 24, 32, 40, 64)] == [2, 2, 1, 1, 0, 0]
    assert MOST_ROOM < MAX_SHARED
