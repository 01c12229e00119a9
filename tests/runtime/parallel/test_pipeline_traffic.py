"""Random traffic over stages: preemption, prefixes, chunks, forms, faults; the tokens of one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lamina import Runtime, SamplingParams
from lamina.common.errors import EngineDeadError
from lamina.runtime.adapters.config import LoRAConfig
from lamina.runtime.executor import worker_answers
from lamina.runtime.worker.model_runner import ModelRunner

from ...adapters import ALL_MODULES, write_adapter
from ...families import FAMILIES
from ...thread_workers import thread_workers
from .test_traffic import TIGHT, answers

PLAIN: dict[str, Any] = {"device": "cpu", "dtype": "float64", "compile": False, "num_kv_blocks": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
PROMPTS = [[5, 9, 301], [7] * 11 + [44, 3], [3, 1, 4, 1, 5]]


@pytest.mark.parametrize("tensor_parallel, stages", [(1, 2), pytest.param(2, 2, marks=pytest.mark.long)])
def test_random_traffic_has_the_tokens_of_one_process(
    tensor_parallel: int, stages: int, tiny_text_folder: Path
) -> None:
    expected, _ = answers(tiny_text_folder, stages, **TIGHT)
    with thread_workers():
        found, preempted = answers(
            tiny_text_folder,
            stages,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=stages,
            **TIGHT,
        )
    assert preempted > 0
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert [one[2] for one in found] == pytest.approx([one[2] for one in expected], rel=1e-6, abs=1e-6)


def failing(ranks: set[int], at: set[int], rank: int, runner: ModelRunner) -> None:
    """Have some steps of some ranks raise, by their numbers."""
    execute, count = runner._execute, [0]

    def faulty(plan: Any) -> Any:
        count[0] += 1
        if rank in ranks and count[0] in at:
            raise ValueError(f"step {count[0]} is broken on rank {rank}")
        return execute(plan)

    runner._execute = faulty  # type: ignore[method-assign]


def tokens_of(folder: Path, **settings: Any) -> Any:
    params = [
        SamplingParams(temperature=0.7, seed=n, max_tokens=8 + n % 5, ignore_eos=True, detokenize=False)
        for n in range(9)
    ]
    prompts = [[5, 9 + n, 301] * (1 + n % 4) for n in range(9)]
    with Runtime.from_pretrained(folder, **PLAIN, **settings) as runtime:
        return [one.outputs[0].token_ids for one in runtime.generate(prompts, params)]


@pytest.mark.parametrize(
    "ranks, stages, tensor_parallel",
    [
        ({1}, 3, 1),
        pytest.param({0}, 2, 1, marks=pytest.mark.long),
        pytest.param({2}, 3, 1, marks=pytest.mark.long),
        pytest.param({2, 3}, 2, 2, marks=pytest.mark.long),
    ],
)
def test_a_step_that_fails_in_any_stage_is_tried_again(
    ranks: set[int], stages: int, tensor_parallel: int, tmp_path: Path
) -> None:
    folder = FAMILIES["qwen3-tied"].save(tmp_path)
    expected, settings = tokens_of(folder), {"tensor_parallel": tensor_parallel, "pipeline_parallel": stages}
    with thread_workers(partial(failing, ranks, {3, 4, 17})):
        assert tokens_of(folder, **settings) == expected


def test_a_rank_that_fails_alone_in_its_stage_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_answers, "SECONDS_TO_AGREE", 0.2)
    said = "failed on rank 1 and not on all others.*broken on rank 1"
    with thread_workers(partial(failing, {1}, {4})), pytest.raises(EngineDeadError, match=said):
        tokens_of(FAMILIES["qwen3-tied"].save(tmp_path), pipeline_parallel=2, tensor_parallel=2)


def test_adapters_quantization_and_sleep_work_over_stages(tiny_text_folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tiny_text_folder, tmp_path / "adapter", seed=1, target_modules=ALL_MODULES)

    def found(**settings: Any) -> list[Any]:
        settings |= {**PLAIN, "lora": LoRAConfig(max_loras=2, max_lora_rank=8), "quantization": "int8"}
        with Runtime.from_pretrained(tiny_text_folder, **settings) as runtime:
            runtime.load_adapter("one", adapter)
            tokens = []
            for level in (0, 1, 2):
                if level:
                    runtime.sleep(level=level)
                    runtime.wake()
                for name in (None, "one"):
                    outputs = runtime.generate(PROMPTS, GREEDY, adapter=name)
                    tokens.append([one.outputs[0].token_ids for one in outputs])
        return tokens

    expected = found()
    assert expected[0] != expected[1]
    assert expected[:2] == expected[2:4] == expected[4:]
    with thread_workers():
        assert found(pipeline_parallel=2) == expected
