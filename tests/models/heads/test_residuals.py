"""The sums that every layer begins with, as heads are given them: transformers' hidden states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.common.errors import UnsupportedError
from lamina.models.config import read_model_config
from lamina.models.heads.definition import with_residuals
from lamina.models.layers import FAST_OPS
from lamina.models.registry import find_model

from ...families import FAMILIES, SIZES, oracle

PROMPT = [(37 * i) % 317 + 3 for i in range(24)]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "smollm3"])
def test_every_family_shows_the_sum_that_each_layer_begins_with(
    name: str, logits_of: Callable[..., Tensor], tmp_path: Path
) -> None:
    folder = FAMILIES[name].save(tmp_path)
    found: dict[int, Tensor] = {}
    logits_of(folder, PROMPT, ops=FAST_OPS._replace(show_residual=found.__setitem__))
    with torch.no_grad():
        model = oracle(folder, FAMILIES[name].architecture)
        expected = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    assert sorted(found) == [*range(SIZES["num_hidden_layers"] + 1)]
    for layer in range(SIZES["num_hidden_layers"]):  # transformers norms the last
        scale = float(expected[layer].abs().max())
        torch.testing.assert_close(found[layer], expected[layer][0], rtol=1e-4, atol=1e-5 * scale)


def run(folder: Path, layers: tuple[int, ...], forward: Any = None) -> Tensor:
    config = read_model_config(folder)
    definition = find_model(config.architecture)
    forward = with_residuals(forward or definition.forward, layers)
    out: Tensor = forward(config, {}, torch.zeros(3, dtype=torch.int32), None, None, FAST_OPS)  # type: ignore[arg-type]
    return out


def test_sums_are_columns_in_the_order_asked_for(tiny_folder: Path) -> None:
    def forward(
        config: Any, weights: Any, token_ids: Tensor, positions: Any, attend: Any, ops: Any
    ) -> Tensor:
        for layer in range(4):
            ops.show_residual(layer, torch.full((3, 2), float(layer)))
        return torch.full((3, 2), 9.0)

    assert run(tiny_folder, (3, 0, 1), forward).tolist() == [[9, 9, 3, 3, 0, 0, 1, 1]] * 3
    assert run(tiny_folder, (), forward).tolist() == [[9, 9]] * 3


def test_a_model_that_shows_no_sums_is_refused_by_name(tiny_folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM shows no residual sums.*show_residual"):
        run(tiny_folder, (1,), lambda *_: torch.zeros(3, 2))
