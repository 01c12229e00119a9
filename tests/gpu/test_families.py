"""Tiny models of the families on a GPU: windows, soft caps, odd rotations and other norms in our kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamina import Runtime, SamplingParams

from ..families import FAMILIES, oracle, oracle_logits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS = [[(37 * i + 11 * n) % 317 + 3 for i in range(length)] for n, length in enumerate((1, 4, 19))]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
NEAR_TIE = 1e-3
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": 128,
    "num_kv_blocks": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: FAMILIES[name].save(tmp_path_factory.mktemp(name))


def answers(folder: Path, cache: Path, **settings: Any) -> list[list[int]]:
    with Runtime.from_pretrained(folder, cache_dir=cache, **SETTINGS | settings) as runtime:
        return [list(output.outputs[0].token_ids) for output in runtime.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("name", ["gemma3", "smollm3-windows", "phi3-longrope", "granite", "llama-chunks"])
def test_tokens_are_those_of_transformers(
    name: str, folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    """Compiled and captured, in float32; where the two best of the oracle nearly tie, either may win."""
    folder = folder_of(name)
    model = oracle(folder, FAMILIES[name].architecture)
    for prompt, got in zip(PROMPTS, answers(folder, compile_cache, dtype="float32"), strict=True):
        logits = oracle_logits(model, prompt + got)[len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for place, token in enumerate(got):
            lead = float(best[place, 0] - best[place, 1])
            assert token == int(logits[place].argmax()) or lead < NEAR_TIE, f"token {place} of {prompt}"


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_exact_mode_gives_the_tokens_of_the_eager_model(
    name: str, folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    folder = folder_of(name)
    exact = {"dtype": "bfloat16", "numerics": "exact"}
    eager = answers(folder, compile_cache, compile=False, **exact)
    assert answers(folder, compile_cache, **exact) == eager
