"""Logits that are not finite on a GPU: their request ends with an error, in CUDA graphs too; others go on."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lamina import BeamSearchParams, CompileConfig, LogitsError, Runtime, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPT, OTHER = [5, 6], [9, 8, 7]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}


def answer(runtime: Runtime, prompt: list[int]) -> tuple[int, ...]:
    return runtime.generate([prompt], SamplingParams(**GREEDY))[0].outputs[0].token_ids


@pytest.fixture(scope="module", params=["auto", "off"])
def broken(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Runtime, tuple[int, ...], tuple[int, ...]]]:
    """A runtime with NaN in the embedding of the last of some tokens, which come in steps of one token each.

    With them, what a prompt without that token is answered.
    """
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 8,
        "compile": CompileConfig(cuda_graphs=request.param),
        "cache_dir": tmp_path_factory.mktemp("cache"),
    }
    with Runtime.from_pretrained(tiny_folder, **settings) as sound:
        first, other = answer(sound, PROMPT), answer(sound, OTHER)
    place = next(i for i in range(2, 30) if first[i] not in (*first[:i], *other, *PROMPT, *OTHER))
    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("broken") / "tiny")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][first[place]] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with Runtime.from_pretrained(folder, **settings) as runtime:
        yield runtime, first[: place + 1], other


def test_a_request_that_breaks_in_its_middle_ends_alone(broken: Any) -> None:
    runtime, before, other = broken
    beside = runtime.stream(OTHER, SamplingParams(**GREEDY))
    received = list(next(beside).token_ids)
    stream = runtime.stream(PROMPT, SamplingParams(**GREEDY))
    assert tuple(next(stream).token_ids[0] for _ in before) == before
    with pytest.raises(LogitsError, match="lamina verify"):
        list(stream)
    received += [id_ for delta in beside for id_ in delta.token_ids]
    assert tuple(received) == other
    assert runtime.stats()["blocks"]["used"] == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "top_p": 0.9},
        {"presence_penalty": 1.0, "bad_words": [[3]]},
        {"temperature": 1.0, "typical_p": 0.5},
        {"logprobs": 2},
        {"min_tokens": 2, "stop_token_ids": [3]},
        {"logits_processors": [lambda prompt, answer, logits: logits.nan_to_num()]},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_whatever_is_asked_the_error_is_the_same(broken: Any, settings: dict[str, Any]) -> None:
    runtime, before, other = broken
    with pytest.raises(LogitsError):
        runtime.generate([[4, before[-1]]], SamplingParams(**GREEDY | settings))
    with pytest.raises(LogitsError):
        runtime.generate([[4, before[-1], 4]], SamplingParams(**GREEDY, prompt_logprobs=0))
    with pytest.raises(LogitsError):
        runtime.beam_search([[4, before[-1]]], BeamSearchParams(beam_width=2, max_tokens=3))
    assert answer(runtime, OTHER) == other
    assert runtime.stats()["blocks"]["used"] == 0
