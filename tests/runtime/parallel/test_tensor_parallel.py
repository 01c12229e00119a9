"""A model whose weights are spread over ranks: its logits are those of one process, and so are its tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina import CompileConfig, Runtime, SamplingParams
from lamina.custom_ops.all_reduce.group import Group

from ...families import FAMILIES
from ...ranks import as_threads

PROMPTS = [[5, 9, 301], [7] * 11 + [44, 3], list(range(10, 47))]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


def run(
    folder: Path, prompts: Sequence[Sequence[int]], params: Any, **settings: Any
) -> tuple[Any, list[Tensor]]:
    """The tokens of every answer, and the logits that they were sampled from, step by step."""
    seen: list[Tensor] = []
    with Runtime.from_pretrained(folder, device="cpu", **settings) as runtime:
        runtime._loaded.runner.on_logits = lambda plan, logits: seen.append(logits.clone())
        answers = runtime.generate([list(prompt) for prompt in prompts], params)
    return [[list(one.token_ids) for one in answer.outputs] for answer in answers], seen


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_one_process(name: str, ranks: int, tmp_path: Path) -> None:
    folder = FAMILIES[name].save(tmp_path)
    settings = {"dtype": "float64", "compile": False, "num_kv_blocks": 64}
    tokens, logits = run(folder, PROMPTS, GREEDY, **settings)

    def work(group: Group) -> tuple[Any, list[Tensor]]:
        return run(folder, PROMPTS, GREEDY, tensor_parallel=ranks, **settings)

    every_rank = as_threads(ranks, work)
    for own_tokens, own_logits in every_rank:
        assert own_tokens == tokens
        for got, want, first in zip(own_logits, logits, every_rank[0][1], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
            assert torch.equal(got, first)


def plan_and_replays(folder: Path, **settings: Any) -> tuple[Any, int, int, int]:
    """Tokens; unique pieces, those that were compiled, and steps that a CPU call graph served."""
    with Runtime.from_pretrained(folder, device="cpu", num_kv_blocks=64, **settings) as runtime:
        answers = runtime.generate([list(prompt) for prompt in PROMPTS], LONGER)
        loaded = runtime._loaded
        assert loaded is not None
    assert loaded.compiled is not None
    pieces, compiled = len(loaded.compiled.plan.pieces), loaded.compiled.num_compiled
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    return tokens, pieces, compiled, loaded.runner.num_cpu_replays


LONGER = SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.mark.long
@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_ranks_load_one_plan_of_three_pieces_and_replay_its_calls(
    numerics: str, tmp_path: Path, compile_cache: Path
) -> None:
    # Every piece has a norm, and no other test this epsilon: all share the cache.
    folder = FAMILIES["llama-chunks"].save(tmp_path, rms_norm_eps=3e-5)
    settings: dict[str, Any] = {"dtype": "float32", "cache_dir": compile_cache, "numerics": numerics}
    with Runtime.from_pretrained(
        folder, compile=False, device="cpu", num_kv_blocks=64, **settings
    ) as runtime:
        expected = [list(one.outputs[0].token_ids) for one in runtime.generate(PROMPTS, LONGER)]

    def work(group: Group) -> Any:
        return plan_and_replays(folder, tensor_parallel=2, **settings)

    first, second = as_threads(2, work), as_threads(2, work)
    assert sum(found[2] for found in first) == 3, "one rank compiles, and the others load"
    for tokens, pieces, compiled, replays in second:
        assert tokens == expected
        assert (pieces, compiled) == (3, 0)
        assert replays > 0


@pytest.mark.long
def test_logits_over_ranks_have_the_bits_that_they_have_alone(tiny_folder: Path, compile_cache: Path) -> None:
    """With batch_invariant: sums over ranks are made in one order, whatever the number of rows."""
    mode = CompileConfig(batch_invariant=True, verify=False)
    settings = {"dtype": "bfloat16", "num_kv_blocks": 64, "compile": mode, "cache_dir": compile_cache}
    once = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    prompts = [*PROMPTS, [3] * 50]

    def logits_of(group: Group) -> tuple[list[Tensor], Tensor]:
        alone = [run(tiny_folder, [each], once, tensor_parallel=2, **settings)[1][-1][0] for each in prompts]
        _, together = run(tiny_folder, prompts, once, tensor_parallel=2, **settings)
        assert len(together) == 1, "they are computed in one step"
        return alone, together[0]

    for alone, together in as_threads(2, logits_of):
        assert all(torch.equal(one, row) for one, row in zip(alone, together, strict=True))
