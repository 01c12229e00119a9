"""Tiny models of every family through the whole runtime, against transformers on the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamina import Runtime, SamplingParams

from ..families import FAMILIES, oracle, oracle_choices

pytestmark = pytest.mark.usefixtures("build_once", "two_threads")

NUM_TOKENS = 64
PROMPTS = [[(37 * i + 11 * n) % 317 + 3 for i in range(length)] for n, length in enumerate((1, 4, 19))]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 4,
    "prefill_chunk": 7,
    "num_kv_blocks": 64,
}
# One of each kind of forward, with the unique pieces of its five; the others differ in what is not compiled.
COMPILED = {"gemma3": 3, "smollm3-windows": 4, "phi3-longrope": 3, "granite": 3, "qwen3": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A family's checkpoint and transformers' model of it."""
    known: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in known:
            folder = FAMILIES[name].save(tmp_path_factory.mktemp(name), max_shard_size="100KB")
            known[name] = folder, oracle(folder, FAMILIES[name].architecture)
        return known[name]

    return make


def check_answers(runtime: Runtime, model: Any) -> None:
    for prompt, output in zip(PROMPTS, runtime.generate(PROMPTS, GREEDY), strict=True):
        answer = list(output.outputs[0].token_ids)
        assert len(answer) == NUM_TOKENS
        assert answer == oracle_choices(model, prompt, answer)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_runtime_gives_the_tokens_of_transformers(name: str, made: Any) -> None:
    """In a batch, over small blocks, with prompts in chunks, from a checkpoint in several files."""
    folder, model = made(name)
    assert len(list(folder.glob("*.safetensors"))) > 1
    with Runtime.from_pretrained(folder, **SETTINGS, compile=False) as runtime:
        check_answers(runtime, model)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_it_gives_them_too_from_few_pieces_with_every_norm_of_a_sum_named(
    name: str, made: Any, compile_cache: Path
) -> None:
    folder, model = made(name)
    with Runtime.from_pretrained(folder, **SETTINGS, cache_dir=compile_cache) as runtime:
        check_answers(runtime, model)
        assert runtime.stats()["compile"]["unique_pieces"] == COMPILED[name]
        middle = runtime.explain().split("\npiece ")[2]
        assert "pass add_rms_norm: 2 sites" in middle
