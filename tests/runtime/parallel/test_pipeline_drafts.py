"""Drafts over stages: whoever drafts, random traffic has the tokens of one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lamina import Draft, Eagle, NGram, Runtime, SamplingParams
from lamina.compiler.execution.cuda_graphs import CudaGraphs
from lamina.runtime.scheduler.replay import replay
from lamina.runtime.startup import builder, captures
from lamina.runtime.worker.drafter import DraftInput
from lamina.runtime.worker.model_runner import ModelRunner

from ...heads import RandomHead
from ...thread_workers import thread_workers
from .test_heads import HEADS
from .test_pipeline_traffic import PLAIN, failing
from .test_traffic import TIGHT, answers

PROMPTS = [[5, 9, 301], [7] * 11 + [44, 3], list(range(10, 47)), [70, 71, 72] * 6]
PARAMS = [
    SamplingParams(temperature=heat, seed=3, max_tokens=24, ignore_eos=True, detokenize=False)
    for heat in (0.0, 0.0, 0.8, 0.0)
]
STAGES = [
    pytest.param(1, 2, id="two stages"),
    pytest.param(2, 2, id="two stages of two ranks", marks=pytest.mark.long),
]
DEAREST = {"eagle-3 of an odd number of ids", "eagle-3 with a norm before fc"}
KINDS = [pytest.param(kind, marks=pytest.mark.long if kind in DEAREST else ()) for kind in HEADS]
Proposals = dict[tuple[str, int], list[int]]  # by request and how many of its tokens are computed


def run(folder: Path, speculative: Any, **settings: Any) -> tuple[Any, Any]:
    """Tokens, and what became of drafts."""
    with Runtime.from_pretrained(folder, speculative=speculative, **PLAIN | settings) as runtime:
        found = runtime.generate(PROMPTS, PARAMS)
        counts = runtime.stats()["speculation"]
    return [list(one.outputs[0].token_ids) for one in found], counts


def watch(proposals: Proposals, last: int, rank: int, runner: ModelRunner) -> None:
    """Keep what the drafter of a rank proposes."""
    if rank != last or runner._speculator is None:
        return
    drafter: Any = runner._speculator._drafter
    propose = drafter.propose

    def watched(step: DraftInput, draft_ids: Tensor) -> None:
        propose(step, draft_ids)
        for row, request_id in enumerate(step.request_ids):
            if step.num_drafts and bool(step.is_sampling[row]):
                place = request_id, int(step.num_computed[row])
                proposals[place] = draft_ids[row, : step.num_drafts].tolist()

    drafter.propose = watched


@pytest.mark.parametrize("tensor_parallel, stages", STAGES)
def test_random_traffic_has_the_tokens_of_one_process(
    tensor_parallel: int, stages: int, tiny_text_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    expected, _ = answers(tiny_text_folder, 5, **TIGHT)
    with thread_workers():
        found, preempted = answers(
            tiny_text_folder,
            5,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=stages,
            speculative="ngram:3",
            record=log,
            **TIGHT,
        )
    assert preempted > 0
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert [one[2] for one in found] == pytest.approx([one[2] for one in expected], rel=1e-6, abs=1e-6)
    assert replay(log).difference is None


@pytest.mark.parametrize("tensor_parallel, stages", STAGES)
def test_a_twin_of_the_model_drafts_what_the_model_draws(
    tensor_parallel: int, stages: int, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, _ = run(tiny_folder, None)
    ranks = {"tensor_parallel": tensor_parallel, "pipeline_parallel": stages}
    with thread_workers():
        found, counts = run(tiny_folder, Draft(model=tiny_folder, k=3), **ranks)
    assert found == tokens
    assert counts["accepted_tokens"] == counts["draft_tokens"] > 20
    assert not caplog.messages, "steps that failed"


@pytest.mark.parametrize("tensor_parallel, stages", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_draft_what_they_draft_in_one_process(
    kind: str, tensor_parallel: int, stages: int, tiny_folder: Path, tmp_path: Path
) -> None:
    head = Eagle(model=RandomHead(**HEADS[kind]).save(tmp_path), k=3)
    ranks = {"tensor_parallel": tensor_parallel, "pipeline_parallel": stages}
    proposals: list[Proposals] = [{}, {}]
    with thread_workers(partial(watch, proposals[0], 0)):
        tokens, _ = run(tiny_folder, head, executor="multiproc")
    with thread_workers(partial(watch, proposals[1], stages * tensor_parallel - 1)):
        found, counts = run(tiny_folder, head, **ranks)
    assert found == tokens == run(tiny_folder, None)[0]
    assert counts["draft_tokens"] > 0
    both = proposals[0].keys() & proposals[1].keys()
    assert len(both) > 20
    assert {place: proposals[1][place] for place in both} == {place: proposals[0][place] for place in both}


@pytest.mark.long
def test_a_step_with_drafts_that_fails_in_any_stage_is_tried_again(tiny_folder: Path) -> None:
    tokens, _ = run(tiny_folder, None)
    for ranks in ({0}, {1}):
        with thread_workers(partial(failing, ranks, {3, 4, 17})):
            found, counts = run(tiny_folder, Draft(model=tiny_folder, k=3), pipeline_parallel=2)
        assert found == tokens
        assert counts["accepted_tokens"] > 0


def test_captured_steps_with_drafts_come_to_the_same(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a capture is the step itself on the memory of the capture, so that what is stale shows."""
    tokens, _ = run(tiny_folder, None)
    monkeypatch.setattr(builder, "new_cuda_graphs", lambda resolved: CudaGraphs(resolved.device))
    monkeypatch.setattr(captures, "DECODE_SIZES", (1, 2, 4))
    with thread_workers():
        found, counts = run(tiny_folder, NGram(k=3, min_ngram=1), pipeline_parallel=2)
    assert found == tokens
    assert counts["accepted_tokens"] > 0


@pytest.mark.long
def test_a_plan_of_a_stage_drafts_the_same(tiny_folder: Path, tmp_path: Path, compile_cache: Path) -> None:
    head = Eagle(model=RandomHead(**HEADS["eagle-3 without embedding"]).save(tmp_path), k=3)
    compiled = {"compile": True, "cache_dir": compile_cache, "dtype": "float32"}
    tokens, _ = run(tiny_folder, head, **compiled)
    with thread_workers():
        found, counts = run(tiny_folder, head, pipeline_parallel=2, **compiled)
    assert found == tokens
    assert counts["draft_tokens"] > 0


@pytest.mark.long
def test_the_same_over_processes_that_talk_by_gloo(tiny_folder: Path) -> None:
    tokens, _ = run(tiny_folder, None)
    found, counts = run(tiny_folder, Draft(model=tiny_folder, k=3), pipeline_parallel=2)
    assert found == tokens
    assert counts["accepted_tokens"] == counts["draft_tokens"] > 20
