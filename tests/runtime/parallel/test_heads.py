"""EAGLE heads over ranks: what they draft is what they draft in one process, and no answer changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import Eagle, Runtime, SamplingParams, UnsupportedError
from lamina.custom_ops.all_reduce.group import Group
from lamina.runtime.worker.drafters.draft_sampler import DraftSampler

from ...heads import RandomHead
from ...ranks import as_processes, as_threads

PROMPTS = [[5, 9, 301], [7] * 11 + [44, 3], list(range(10, 47))]
PARAMS = [
    SamplingParams(temperature=heat, seed=3, max_tokens=14, ignore_eos=True, detokenize=False)
    for heat in (0.0, 0.0, 0.8)
]
SUMS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}  # TINY has two layers
HEADS: dict[str, dict[str, Any]] = {
    "eagle-1": {"is_third": False},
    "eagle-3 of an odd number of ids": {"is_third": True, "changes": SUMS, "draft_vocab_size": 51},
    "eagle-3 without embedding": {"is_third": True, "changes": SUMS, "has_embedding": False},
    "eagle-3 with a norm before fc": {"is_third": True, "changes": SUMS, "norm_before_fc": True},
}
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "compile": False, "num_kv_blocks": 64}


def run(folder: Path, head: Path | None, **settings: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    """Tokens, what became of drafts, and the scores that drafts were drawn from, draw by draw."""
    speculative = None if head is None else Eagle(model=head, k=3)
    scores: list[torch.Tensor] = []
    with Runtime.from_pretrained(folder, speculative=speculative, **SETTINGS | settings) as runtime:
        speculator = runtime._loaded.runner._speculator
        if speculator is not None:
            sampler = speculator._drafter._sampler  # type: ignore[attr-defined]
            sampler.sample = watched(sampler, scores)
        answers = runtime.generate(PROMPTS, PARAMS)
        counts = runtime.stats()["speculation"]
    return [list(one.outputs[0].token_ids) for one in answers], counts, scores


def watched(sampler: DraftSampler, scores: list[torch.Tensor]) -> Any:
    draw = sampler.sample

    def sample(own: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        scores.append(own.clone())
        return draw(own, positions)

    return sample


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", HEADS)
def test_heads_draft_what_they_draft_in_one_process(
    kind: str, ranks: int, tiny_folder: Path, tmp_path: Path
) -> None:
    head = RandomHead(**HEADS[kind]).save(tmp_path)
    tokens, counts, scores = run(tiny_folder, head)
    assert tokens == run(tiny_folder, None)[0]
    assert counts["draft_tokens"] > 0

    def work(group: Group) -> Any:
        return run(tiny_folder, head, tensor_parallel=ranks)

    every_rank = as_threads(ranks, work)
    for own_tokens, own_counts, own_scores in every_rank:
        assert (own_tokens, own_counts) == (tokens, counts)
        for got, want, first in zip(own_scores, scores, every_rank[0][2], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
            assert torch.equal(got, first)


def in_process(group: Group, folder: Path, head: Path) -> Any:
    torch.set_num_threads(1)
    return run(folder, head, tensor_parallel=group.size)[:2]


@pytest.mark.long
def test_a_plan_of_a_rank_drafts_the_same(tiny_folder: Path, tmp_path: Path, compile_cache: Path) -> None:
    head = RandomHead(**HEADS["eagle-3 without embedding"]).save(tmp_path)
    wanted = run(tiny_folder, head)[0]

    def work(group: Group) -> Any:
        return run(tiny_folder, head, tensor_parallel=2, compile=True, cache_dir=compile_cache)[:2]

    for tokens, counts in as_threads(2, work):
        assert tokens == wanted
        assert counts["draft_tokens"] > 0


@pytest.mark.long
def test_the_same_over_processes_that_talk_by_gloo(tiny_folder: Path, tmp_path: Path) -> None:
    head = RandomHead(**HEADS["eagle-3 without embedding"]).save(tmp_path / "head")
    wanted = run(tiny_folder, head)[:2]
    assert as_processes(2, in_process, tmp_path, tiny_folder, head) == [wanted, wanted]


def test_a_head_that_ranks_do_not_divide_is_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    head = RandomHead(is_third=False, changes={"intermediate_size": 97}).save(tmp_path)

    def work(group: Group) -> None:
        with pytest.raises(UnsupportedError, match=r"the head cannot be shared out.*intermediate_size, 97"):
            run(tiny_folder, head, tensor_parallel=2)

    as_threads(2, work)
