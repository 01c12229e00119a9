"""A model whose layers are shared out over stages: logits and tokens are those of one process."""

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina import Runtime, SamplingParams
from lamina.runtime.protocol.scheduler_output import SchedulerOutput
from lamina.runtime.worker.model_runner import ModelRunner

from ...families import FAMILIES
from ...thread_workers import thread_workers

PROMPTS = [[5, 9, 301], [7] * 11 + [44, 3], list(range(10, 47)), [44, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "compile": False, "num_kv_blocks": 64}


class Seen(dict[tuple[str, int], Tensor]):
    """The logits that each request was sampled from, by its id and the position of the token."""

    def take(self, plan: SchedulerOutput, logits: Tensor) -> None:
        positions = (plan.num_computed_tokens + plan.num_scheduled_tokens)[plan.sample_rows]
        for place, row in enumerate(plan.sample_rows.tolist()):
            self[plan.request_ids[row], int(positions[place])] = logits[place].clone()


def alone(folder: Path) -> tuple[Any, Seen]:
    """Tokens and logits of one process."""
    seen = Seen()
    with Runtime.from_pretrained(folder, **SETTINGS) as runtime:
        runtime._loaded.runner.on_logits = seen.take
        return [one.outputs[0].token_ids for one in runtime.generate(PROMPTS, GREEDY)], seen


def test_stages_compute_at_the_same_time(tmp_path: Path) -> None:
    folder, num_tokens = FAMILIES["qwen3-tied"].save(tmp_path), 6
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    both = threading.Barrier(2, timeout=60)  # broken where one waits for the other in vain

    def meet(rank: int, runner: ModelRunner) -> None:
        execute, count = runner._execute, itertools.count()

        def meeting(plan: SchedulerOutput) -> Any:
            number = next(count)
            if (rank == 0 and number > 0) or (rank == 1 and number < 2 * num_tokens - 1):
                both.wait()  # the first stage in a step, and the second in the one before
            return execute(plan)

        runner._execute = meeting  # type: ignore[method-assign]

    with thread_workers(meet), Runtime.from_pretrained(folder, pipeline_parallel=2, **SETTINGS) as runtime:
        answers = runtime.generate(PROMPTS[:2], params)
    assert [len(one.outputs[0].token_ids) for one in answers] == [num_tokens] * 2


@pytest.mark.parametrize(
    "name, tensor_parallel, stages",
    [
        ("qwen3-tied", 1, 2),
        ("gemma3", 1, 4),  # tied, sliding layers in the first two stages alone, two ropes
        ("granite", 2, 2),
        pytest.param("llama-chunks", 1, 3, marks=pytest.mark.long),
        pytest.param("smollm3-windows", 1, 2, marks=pytest.mark.long),
        pytest.param("gemma2", 2, 2, marks=pytest.mark.long),
    ],
)
def test_logits_are_those_of_one_process(
    name: str, tensor_parallel: int, stages: int, tmp_path: Path
) -> None:
    folder = FAMILIES[name].save(tmp_path)
    tokens, logits = alone(folder)
    last, seen = stages * tensor_parallel - 1, Seen()

    def watch(rank: int, runner: ModelRunner) -> None:
        runner.on_logits = seen.take if rank == last else lambda plan, logits: None  # or none are gathered

    with (
        thread_workers(watch),
        Runtime.from_pretrained(
            folder, tensor_parallel=tensor_parallel, pipeline_parallel=stages, **SETTINGS
        ) as runtime,
    ):
        assert [one.outputs[0].token_ids for one in runtime.generate(PROMPTS, GREEDY)] == tokens
    assert seen.keys() == logits.keys()
    for place, own in seen.items():
        torch.testing.assert_close(own, logits[place], rtol=1e-10, atol=1e-10)
