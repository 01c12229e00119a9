"""Steps whose hidden states are read of few tokens compute the last piece for these, and answer the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lamina import CompileConfig, Runtime, SamplingParams
from lamina.runtime.worker import sampler
from lamina.runtime.worker.input_batch import BatchView
from lamina.runtime.worker.model_runner import ModelRunner

pytestmark = pytest.mark.timeout(600)
LONG = [(7 * place + place // 3) % 320 for place in range(90)]
PROMPTS = [LONG, LONG[5:60], [3, 1, 4], LONG[::-1][:70]]


class Counted:
    """How many rows of hidden states each step had of how many tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[int, int]] = []
        sample = ModelRunner._sample

        def counted(runner: ModelRunner, batch: BatchView, computed: Tensor, *more: Any) -> Any:
            self.steps.append((len(computed), len(batch.token_ids)))
            return sample(runner, batch, computed, *more)

        monkeypatch.setattr(ModelRunner, "_sample", counted)

    @property
    def of_prompts(self) -> list[tuple[int, int]]:
        return [step for step in self.steps if step[1] >= sampler.LEAST_TOKENS["cpu"]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture(params=["compiled", "captured"])
def runtime(request: pytest.FixtureRequest, tiny_folder: Path, compile_cache: Path) -> Iterator[Runtime]:
    config = CompileConfig(cuda_graphs="on" if request.param == "captured" else "off")
    settings: dict[str, Any] = {"compile": config, "cache_dir": compile_cache, "device": "cpu"}
    settings["prefix_cache"] = False
    with Runtime.from_pretrained(tiny_folder, dtype="float32", max_num_seqs=8, **settings) as runtime:
        yield runtime


def answers(runtime: Runtime, **params: Any) -> list[Any]:
    asked = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, **params)
    return [output.outputs[0] for output in runtime.generate(PROMPTS, asked)]


def test_the_tokens_are_those_of_all_hidden_states(
    runtime: Runtime, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [tuple(answer.token_ids) for answer in answers(runtime)]
    assert counted.of_prompts
    assert all(2 * rows <= num_tokens for rows, num_tokens in counted.of_prompts)
    monkeypatch.setitem(sampler.LEAST_TOKENS, "cpu", 1 << 30)
    assert [tuple(answer.token_ids) for answer in answers(runtime)] == found


def test_log_probabilities_of_prompts_are_of_all_hidden_states(runtime: Runtime, counted: Counted) -> None:
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = runtime.generate([LONG], asked)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(LONG)
    assert all(rows == num_tokens for rows, num_tokens in counted.of_prompts)


def test_a_part_of_a_prompt_that_samples_nothing_computes_one_row(
    tiny_folder: Path, compile_cache: Path, counted: Counted
) -> None:
    config = CompileConfig(cuda_graphs="off")
    settings: dict[str, Any] = {"compile": config, "cache_dir": compile_cache, "device": "cpu"}
    with Runtime.from_pretrained(tiny_folder, dtype="float32", **settings) as whole:
        expected = answers(whole)[0].token_ids
    del counted.steps[:]
    settings["max_num_batched_tokens"] = 40
    with Runtime.from_pretrained(tiny_folder, dtype="float32", **settings) as runtime:
        del counted.steps[:]  # those of its start
        asked = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        (output,) = runtime.generate([LONG], asked)
    assert counted.of_prompts == [(1, 40), (1, 40)]
    assert output.outputs[0].token_ids == expected
