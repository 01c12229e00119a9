"""Random traffic over ranks: preemption, prefixes, chunks, drafts, forms; the tokens of one process."""

import random
from pathlib import Path
from typing import Any

import pytest

from lamina import Runtime, SamplingParams, StructuredOutputs
from lamina.custom_ops.all_reduce.group import Group

from ...ranks import as_threads

TIGHT = {
    "num_kv_blocks": 12,
    "block_size": 8,
    "prefill_chunk": 7,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 10,
}
FORMS = (None, None, StructuredOutputs(regex="[a-c]{2,9}"), StructuredOutputs(json={"type": "boolean"}))


def traffic(seed: int, num_requests: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that often begin alike, and parameters of every kind."""
    chance = random.Random(seed)
    prefix = [chance.randrange(3, 250) for _ in range(20)]
    prompts, params = [], []
    for number in range(num_requests):
        own = [chance.randrange(3, 250) for _ in range(chance.randrange(1, 14))]
        prompts.append(prefix[: chance.choice((0, 9, 20))] + own * chance.choice((1, 1, 2)))
        form = chance.choice(FORMS)
        params.append(
            SamplingParams(
                temperature=chance.choice((0.0, 0.8, 1.3)),
                top_p=chance.choice((1.0, 0.9)),
                top_k=chance.choice((0, 20)),
                repetition_penalty=chance.choice((1.0, 1.0, 1.2)),
                logprobs=chance.choice((0, 3)),
                seed=number,
                max_tokens=chance.randrange(8, 40),
                ignore_eos=form is None,
                structured_outputs=form,
            )
        )
    return prompts, params


def answers(folder: Path, seed: int, **settings: Any) -> tuple[Any, int]:
    """Tokens and likelihoods of every answer, and how many requests made room for others."""
    prompts, params = traffic(seed, 24)
    with Runtime.from_pretrained(folder, device="cpu", dtype="float64", compile=False, **settings) as runtime:
        outputs = [one.outputs[0] for one in runtime.generate(prompts, params)]
        preempted = runtime.stats()["preemptions"]
    return [(list(one.token_ids), one.text, one.cumulative_logprob) for one in outputs], preempted


@pytest.mark.parametrize("ranks, speculative", [(2, "ngram:3"), (4, None)])
def test_random_traffic_has_the_tokens_of_one_process(
    ranks: int, speculative: str | None, tiny_text_folder: Path
) -> None:
    settings: dict[str, Any] = {**TIGHT, "speculative": speculative}
    expected, preempted = answers(tiny_text_folder, ranks, **settings)
    assert preempted > 0

    def work(group: Group) -> Any:
        return answers(tiny_text_folder, ranks, tensor_parallel=ranks, **settings)

    every_rank = as_threads(ranks, work)
    assert all(one == every_rank[0] for one in every_rank)
    for (tokens, text, likelihood), (own_tokens, own_text, own_likelihood) in zip(
        expected, every_rank[0][0], strict=True
    ):
        assert (own_tokens, own_text) == (tokens, text)
        assert own_likelihood == pytest.approx(likelihood, rel=1e-6, abs=1e-6)


@pytest.mark.long
def test_random_traffic_through_processes_has_the_tokens_of_one(tiny_text_folder: Path) -> None:
    settings: dict[str, Any] = {**TIGHT, "speculative": "ngram:3"}
    expected, _ = answers(tiny_text_folder, 2, **settings)
    found, preempted = answers(tiny_text_folder, 2, tensor_parallel=2, **settings)
    assert preempted > 0
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert [one[2] for one in found] == pytest.approx([one[2] for one in expected], rel=1e-6, abs=1e-6)
