"""Draws from adjusted logits: exact frequencies, neighbours that nothing reaches, tokens kept by slot."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina.runtime.protocol.scheduler_output import Adjusted
from lamina.runtime.sampling_params import SamplingParams
from lamina.runtime.worker.logits_adjuster import Adjuster

VOCAB = 90
PROMPT, ANSWER = (5, 5, 6, 7), (8, 9, 8, 8)
COUNT = 4000

Tokens = list[tuple[int, ...]]


def step(
    tokens: list[tuple[int, ...]], params: list[SamplingParams], logits: Tensor, **change: Any
) -> Tensor:
    """What one step samples of requests that the device knows nothing of, their last token aside."""
    adjuster = Adjuster(num_valid_ids=VOCAB, device=torch.device("cpu"), max_slots=COUNT, max_tokens=4096)
    return choose(adjuster, tokens, params, logits, missed=[own[:-1] for own in tokens], **change)


def choose(
    adjuster: Adjuster,
    tokens: Tokens,
    params: list[SamplingParams],
    logits: Tensor,
    missed: Tokens,
    samples: list[int] | None = None,
) -> Tensor:
    n, num_samples = len(tokens), len(logits)
    which = np.array(range(n) if samples is None else samples)
    positions = torch.full((num_samples,), 1)
    positions[torch.from_numpy(which)] = torch.tensor([len(own) for own in tokens])
    newest = torch.zeros(num_samples, dtype=torch.int32)
    newest[torch.from_numpy(which)] = torch.tensor([own[-1] for own in tokens]).int()
    batch = SimpleNamespace(
        token_ids=newest,
        logits_rows=torch.arange(num_samples).int(),
        sample_positions=positions,
        sampled=torch.full((num_samples,), -9, dtype=torch.int32),
        banned=torch.full((num_samples, 1), -1, dtype=torch.int32),
    )
    adjusted = Adjusted(
        samples=which,
        params=tuple(params),
        num_prompt=np.full(n, len(PROMPT)),
        slots=np.arange(n)[::-1].copy(),
        missed=tuple((n - 1 - i, 0, own) for i, own in enumerate(missed) if own),
        longest=max(map(len, tokens)),
    )
    adjuster.choose(adjusted, batch, logits)  # type: ignore[arg-type]
    return batch.sampled


def resolved(seed: int = 0, **settings: Any) -> SamplingParams:
    return SamplingParams(**settings).resolve(None, seed=seed)


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Of the token after PROMPT and ANSWER, by the definitions, one after another, in float64."""
    scores = logits.double().clone()
    for id_, bias in (params.logit_bias or {}).items():
        scores[id_] += bias
    for id_ in range(VOCAB):
        if params.allowed_token_ids and id_ not in params.allowed_token_ids:
            scores[id_] = -torch.inf
        for word in params.bad_words or ():
            if (*PROMPT, *ANSWER, id_)[-len(word) :] == word:
                scores[id_] = -torch.inf
    for id_ in {*PROMPT, *ANSWER}:
        scores[id_] *= params.repetition_penalty if scores[id_] < 0 else 1 / params.repetition_penalty
    for id_ in ANSWER:
        scores[id_] -= params.frequency_penalty
    for id_ in {*ANSWER}:
        scores[id_] -= params.presence_penalty
    left = (scores / params.temperature).softmax(-1)
    if params.typical_p < 1:
        surprise = -left.log()
        entropy = (left * surprise)[left > 0].sum()
        left = first_with(left, (surprise - entropy).abs(), params.typical_p)
    if 0 < params.top_k < VOCAB:
        left = left * (left >= left.sort(descending=True).values[params.top_k - 1])
    if params.top_p < 1:
        left = first_with(left, -left, params.top_p)
    left = left * (left >= params.min_p * left.max())
    return left / left.sum()


def first_with(probabilities: Tensor, order_by: Tensor, mass: float) -> Tensor:
    """The fewest, in this order, that have so much of the mass."""
    order = order_by.nan_to_num(nan=torch.inf).argsort()
    sums = probabilities[order].cumsum(0) / probabilities.sum()
    kept = order[: int((sums < mass).sum()) + 1]
    return torch.zeros_like(probabilities).index_copy_(0, kept, probabilities[kept])


def chi_square_excess(observed: Tensor, expected: Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean."""
    common = expected >= 5
    observed = torch.cat([observed[common], observed[~common].sum().view(1)]).double()
    expected = torch.cat([expected[common], expected[~common].sum().view(1)])
    used = expected > 0
    freedom = max(int(used.sum()) - 1, 1)
    return (float(((observed - expected)[used] ** 2 / expected[used]).sum()) - freedom) / math.sqrt(
        2 * freedom
    )


LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5
PENALTIES = {"repetition_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": 0.4}


@pytest.mark.parametrize(
    "settings",
    [
        {"typical_p": 0.3},
        {"typical_p": 0.9, "temperature": 0.5},
        {"presence_penalty": -1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 2.5},
        {"logit_bias": {3: 2.0, 8: -4.0}},
        {"allowed_token_ids": [1, 8, 9, 40, 41]},
        {"bad_words": [[8], [8, 3], [9, 8, 4], [7, 8, 8, 5], [6, 7, 8, 9, 8, 8, 6]]},
        PENALTIES | {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        PENALTIES | {"typical_p": 0.8, "top_k": 30, "logit_bias": {8: 3.5}, "bad_words": [[8, 1], [2]]},
        {"typical_p": 0.9, "top_p": 0.8, "min_p": 0.1, "allowed_token_ids": range(50)},
    ],
    ids=str,
)
def test_frequencies_follow_the_adjusted_distribution(settings: dict[str, Any]) -> None:
    params = [resolved(seed, **settings) for seed in range(COUNT)]
    drawn = torch.cat(
        [
            step([(*PROMPT, *ANSWER)] * len(part), part, LOGITS.expand(len(part), -1))
            for part in (params[: COUNT // 2], params[COUNT // 2 :])
        ]
    )
    expected = distribution(LOGITS, params[0]) * COUNT
    observed = torch.bincount(drawn.long(), minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    assert chi_square_excess(observed, expected) < 4


MIXED = [
    {"temperature": 0.0, "presence_penalty": 2.0},
    {"typical_p": 0.4, "top_k": 20},
    {"logit_bias": {3: 4.0}, "repetition_penalty": 1.5},
    {"bad_words": [[8, 1], [60]], "frequency_penalty": -1.0, "typical_p": 0.9},
    {"allowed_token_ids": [1, 2, 3, 70, 71]},
]


def test_a_sample_gets_the_same_token_alone_and_in_any_place_and_others_are_not_touched() -> None:
    params = [resolved(seed, **own) for seed, own in enumerate(MIXED * 4)]
    tokens = [(*PROMPT, *ANSWER[: i % 5]) for i in range(len(params))]
    generator = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(30, VOCAB, generator=generator) * 2).to(dtype)
        before, places = logits.clone(), torch.randperm(30, generator=generator)[: len(params)]
        together = step(tokens, params, logits, samples=places.tolist())
        alone = [
            int(step([tokens[i]], [params[i]], logits[place : place + 1])[0])
            for i, place in enumerate(places.tolist())
        ]
        assert together[places].tolist() == alone
        assert together.eq(-9).sum() == 30 - len(params)
        assert torch.equal(logits, before)


def test_tokens_are_appended_on_the_device_and_may_be_told_again() -> None:
    adjuster = Adjuster(num_valid_ids=VOCAB, device=torch.device("cpu"), max_slots=COUNT, max_tokens=4096)
    params = [resolved(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0)]
    logits = torch.zeros(1, VOCAB)
    logits[0, :5] = torch.tensor([9.0, 8.5, 8.0, 7.5, 7.0])
    said = list(PROMPT)
    for _ in range(1100):  # beyond the room that the history begins with
        missed = [tuple(said[:-1])] if len(said) in (len(PROMPT), 50) else [()]
        counts = torch.bincount(torch.tensor(said[len(PROMPT) :], dtype=torch.int64), minlength=VOCAB)
        expected = int((logits[0] - counts - 2.0 * (counts > 0)).argmax())
        (token,) = choose(adjuster, [tuple(said)], params, logits, missed).tolist()
        assert token == expected
        said.append(token)
