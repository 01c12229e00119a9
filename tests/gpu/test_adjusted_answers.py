"""Adjusted requests on a GPU: they get what they want beside others, which get what they always did."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lamina import CompileConfig, Runtime, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 8, "max_tokens": 30, "ignore_eos": True}
FEW = {"allowed_token_ids": range(40, 44)}
PROMPT = [5, 6, 7, 8, 9, 10]


def turn(prompt: Any, answer: Any, logits: Tensor) -> Tensor:
    return logits.roll(len(answer))


ADJUSTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "typical_p": ({"top_k": 0}, {"typical_p": 0.2}),
    "presence_penalty": (FEW, {"presence_penalty": 2.0}),
    "frequency_penalty": (FEW, {"frequency_penalty": 2.0}),
    "repetition_penalty": (FEW, {"repetition_penalty": 3.0}),
    "logit_bias": ({}, {"logit_bias": {9: 8.0}}),
    "allowed_token_ids": ({}, FEW),
    "bad_words": (FEW, {"bad_words": [[40], [41, 42], [42, 43]]}),
    "logits_processors": ({}, {"logits_processors": [turn]}),
}


@pytest.fixture(scope="module", params=["auto", "off"])
def runtime(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runtime]:
    """float32 on the GPU, with steps captured and without."""
    with Runtime.from_pretrained(
        tiny_folder,
        device="cuda",
        dtype="float32",
        max_num_seqs=32,
        compile=CompileConfig(cuda_graphs=request.param),
        cache_dir=tmp_path_factory.mktemp("cache"),
    ) as runtime:
        yield runtime


def answers(runtime: Runtime, settings: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Of a batch with these settings, each with a seed of its own."""
    params = [SamplingParams(**PLAIN | {"seed": seed} | own) for seed, own in enumerate(settings)]
    return [output.outputs[0].token_ids for output in runtime.generate([PROMPT] * len(params), params)]


@pytest.mark.parametrize("name", ADJUSTED)
def test_a_parameter_changes_its_own_answer_and_no_other(runtime: Runtime, name: str) -> None:
    without, with_it = ADJUSTED[name]
    before = answers(runtime, [{}] * 9 + [without] * 4)
    after = answers(runtime, [{}] * 9 + [without | with_it] * 4)
    assert before[:9] == after[:9]
    assert before[9:] != after[9:]


def test_exclusions_and_penalties_hold_with_two_steps_in_flight(runtime: Runtime) -> None:
    greedy = {"temperature": 0.0, "allowed_token_ids": [40, 41, 42, 43], "presence_penalty": 2.0}
    for answer in answers(runtime, [greedy | {"frequency_penalty": 2.0, "logit_bias": {40: -50}}] * 5):
        assert set(answer) <= {41, 42, 43}
        assert max(map(answer.count, (41, 42, 43))) <= 20, "each time costs 2 more"
    for answer in answers(runtime, [FEW | {"bad_words": [[a, a] for a in range(40, 44)]}] * 5):
        assert all(a != b for a, b in itertools.pairwise(answer)), "a pair was said"
