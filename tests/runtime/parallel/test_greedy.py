"""Steps of greedy samples over ranks: the tokens of one process, and no rank gathers logits of others."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lamina import Runtime, SamplingParams
from lamina.compiler.execution.cuda_graphs import CudaGraphs
from lamina.custom_ops.all_reduce import thread_group
from lamina.custom_ops.all_reduce.group import Group
from lamina.runtime.startup import builder, captures

from ...ranks import as_threads

PROMPTS = [[5, 9, 301], [7] * 11 + [44, 3], list(range(10, 47)), [44, 3], [70, 71, 72] * 6]
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "compile": False, "num_kv_blocks": 64}
GREEDY = {"temperature": 0, "max_tokens": 20, "detokenize": False}
NOT_TO_STOP = {"min_tokens": 12, "stop_token_ids": list(range(60, 200))}
BANNED = SamplingParams(**GREEDY, **NOT_TO_STOP)
KINDS = [{"temperature": 0.8, "seed": 3}, {"logprobs": 2}, {"repetition_penalty": 1.3}, {}, NOT_TO_STOP]
MIXED = [SamplingParams(**GREEDY | {"ignore_eos": True} | kind) for kind in KINDS]


def run(folder: Path, params: Any, **settings: Any) -> list[list[int]]:
    """The tokens of every prompt by itself, then those of all together."""
    with Runtime.from_pretrained(folder, **SETTINGS | settings) as runtime:
        each = params if isinstance(params, list) else [params] * len(PROMPTS)
        found = [runtime.generate([one], own)[0] for one, own in zip(PROMPTS, each, strict=True)]
        found += runtime.generate(PROMPTS, params)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize("ranks, speculative", [(2, "ngram:3"), (4, None)])
def test_tokens_are_those_of_one_process_and_no_logits_are_gathered(
    ranks: int, speculative: str | None, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered, gather = [], thread_group._Rank.all_gather

    def watched(group: Any, x: Tensor, dim: int) -> Tensor:
        gathered.append(x.shape[-1])
        return gather(group, x, dim)

    monkeypatch.setattr(thread_group._Rank, "all_gather", watched)
    expected = run(tiny_folder, BANNED, speculative=speculative)

    def work(group: Group) -> list[list[int]]:
        return run(tiny_folder, BANNED, tensor_parallel=ranks, speculative=speculative)

    assert as_threads(ranks, work) == [expected] * ranks
    own_ids = 320 // ranks
    assert {*gathered} == {2, own_ids}, "a logit with its id, and logits"
    assert gathered.count(own_ids) == ranks, "logits by the trial step of the start alone"


def test_captured_steps_of_any_samples_come_to_the_same(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a capture is the step itself on the memory of the capture, so that what is stale shows."""
    expected = run(tiny_folder, MIXED)
    monkeypatch.setattr(builder, "new_cuda_graphs", lambda resolved: CudaGraphs(resolved.device))
    monkeypatch.setattr(captures, "DECODE_SIZES", (1, 2, 4, 6))
    monkeypatch.setattr(captures, "FEWEST_GREEDY", 1)
    replayed: list[set[bool]] = []
    replay = CudaGraphs.replay

    def watched(graphs: CudaGraphs, key: Any, *args: Any, **kwargs: Any) -> Any:
        replayed.append(getattr(key, "is_greedy", None))
        return replay(graphs, key, *args, **kwargs)

    monkeypatch.setattr(CudaGraphs, "replay", watched)

    def work(group: Group) -> list[list[int]]:
        return run(tiny_folder, MIXED, tensor_parallel=2)

    assert as_threads(2, work) == [expected] * 2
    assert {True, False} <= {*replayed}
