"""Each layer's attention is called by its number, once: compiled, from the cache and eagerly."""

import dataclasses

import pytest
import torch
from torch import Tensor

from lamina import Runtime, SamplingParams
from lamina.common.errors import CompileError
from lamina.models import registry
from lamina.models.families.llama import LLAMA
from lamina.runtime.worker.attention import check_layer

POOL = {"num_kv_blocks": 16, "load_format": "dummy", "dtype": torch.float32}
ANSWER = SamplingParams(max_tokens=3, temperature=0.0)
WRONG = {
    "one too many": (lambda layer: layer + 1, "attend with layer 2; wanted 0 to 1"),
    "from the end": (lambda layer: layer - 2, "attend .*with layer -2; wanted"),
    "the same again": (lambda layer: 0, "attend (is called )?twice with layer 0"),
}


@pytest.fixture
def numbered(monkeypatch, tiny_folder, changed):
    """numbered(renumber) -> the folder of a model that numbers its layers so."""
    monkeypatch.setattr(registry, "_definitions", dict(registry._definitions))

    def make(renumber):
        def forward(config, weights, token_ids, positions, attend, ops) -> Tensor:
            def call(layer: int, *tensors: Tensor) -> None:
                attend(renumber(layer), *tensors)

            return LLAMA.forward(config, weights, token_ids, positions, call, ops)

        registry.register_model("NumberedForCausalLM", dataclasses.replace(LLAMA, forward=forward))
        return changed(tiny_folder, config={"architectures": ["NumberedForCausalLM"]})

    return make


def answer(folder, **settings):
    with Runtime.from_pretrained(folder, **POOL, **settings) as runtime:
        (found,) = runtime.generate([[1, 2, 3]], ANSWER)
        return found.outputs[0].token_ids


@pytest.mark.parametrize("renumber, message", WRONG.values(), ids=WRONG)
def test_an_eager_model_that_numbers_its_layers_wrongly_is_told(numbered, renumber, message):
    with pytest.raises(CompileError, match=message):
        answer(numbered(renumber), compile=False)


@pytest.mark.parametrize("renumber, message", WRONG.values(), ids=WRONG)
def test_so_is_a_compiled_one_and_again_from_the_cache(numbered, renumber, message, tmp_path):
    folder = numbered(renumber)
    for _ in range(2):
        with pytest.raises(CompileError, match=message):
            answer(folder, cache_dir=tmp_path / "cache")


def test_layers_in_any_order_answer_alike_eagerly_and_compiled(numbered):
    folder = numbered(lambda layer: 1 - layer)
    assert answer(folder, compile=False) == answer(folder)


@pytest.mark.parametrize("layer", [2, -1, None, 0.0, "0", 10**40])
def test_what_is_no_layer_is_refused(layer):
    check_layer(0, 2)
    with pytest.raises(CompileError, match="wanted 0 to 1"):
        check_layer(layer, 2)
