"""Models from outside Lamina."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lamina.common.errors import ConfigError, UnsupportedError
from lamina.models import ParameterSpec, find_model, register_model, registry
from lamina.models.families.llama import LLAMA


def test_a_registered_architecture_is_loaded_like_a_built_in_one(
    tiny_folder: Path,
    changed: Callable[..., Path],
    logits_of: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_definitions", {**registry._definitions})
    register_model("OutsideForCausalLM", LLAMA)
    outside = changed(tiny_folder, config={"architectures": ["OutsideForCausalLM"]})
    assert torch.equal(logits_of(outside, [1, 2, 3]), logits_of(tiny_folder, [1, 2, 3]))


def test_registering_the_same_definition_twice_is_harmless() -> None:
    register_model("LlamaForCausalLM", LLAMA)
    assert find_model("LlamaForCausalLM") is LLAMA


def test_an_architecture_cannot_change_its_definition() -> None:
    other = dataclasses.replace(LLAMA, logits=lambda *_: torch.zeros(1))
    with pytest.raises(ConfigError, match="already registered"):
        register_model("LlamaForCausalLM", other)


def test_an_unknown_architecture_says_how_to_register_it() -> None:
    with pytest.raises(UnsupportedError, match=r"known are.*LlamaForCausalLM.*register_model\('Nope'"):
        find_model("Nope")


def test_sources_share_the_rows_equally_unless_told_otherwise() -> None:
    assert ParameterSpec(shape=(8, 3), sources=("a", "b")).source_shapes == {"a": (4, 3), "b": (4, 3)}
    unequal = ParameterSpec(shape=(8, 3), sources=("a", "b"), rows=(6, 2))
    assert unequal.source_shapes == {"a": (6, 3), "b": (2, 3)}


@pytest.mark.parametrize("sources, rows", [("ab", (1, 2)), ("ab", (8,)), ("abc", ())])
def test_sources_that_do_not_fill_the_parameter_are_refused(sources: str, rows: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="8 rows"):
        ParameterSpec(shape=(8, 3), sources=tuple(sources), rows=rows)
