"""Sampling: exact filters, exact frequencies, and draws that know nothing of the batch around them."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.custom_ops.sample._numpy import argmax
from lamina.custom_ops.sample.reference import exponential_noise, row_keys
from lamina.runtime.worker.sampler import SamplingRows, sample

COLUMNS = {
    "temperature": (1.0, torch.float32),
    "top_k": (0, torch.int32),
    "top_p": (1.0, torch.float32),
    "min_p": (0.0, torch.float32),
    "seeds": (0, torch.int64),
    "positions": (0, torch.int64),
}


def rows(count: int, **settings: Any) -> SamplingRows:
    """Settings of `count` rows; a scalar holds for every row."""
    others = {name: settings.pop(name) for name in list(settings) if name not in COLUMNS}
    columns = {}
    for name, (default, dtype) in COLUMNS.items():
        value = torch.as_tensor(settings.get(name, default), dtype=dtype)
        columns[name] = value.expand(count).clone()
    return SamplingRows(**columns, **others)


def one_row(of: SamplingRows, index: int) -> SamplingRows:
    return of._replace(**{name: getattr(of, name)[index : index + 1] for name in COLUMNS})


def draw_many(logits: Tensor, count: int, **settings: Any) -> Tensor:
    """`count` draws from one row of logits, at positions 0 to count - 1."""
    positions = torch.arange(count)
    drawn = [
        sample(logits.expand(len(part), -1), rows(len(part), positions=part, **settings))
        for part in positions.split(4096)
    ]
    return torch.cat(drawn)


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution to draw from, by the definition, in float64."""
    scaled = logits.double() / temperature
    probabilities, order = scaled.softmax(-1).sort(descending=True, stable=True)
    kept = torch.ones(len(order), dtype=torch.bool)
    if 0 < top_k < len(order):
        kept[top_k:] = False
    if top_p < 1:
        share = probabilities * kept / (probabilities * kept).sum()
        kept &= (share.cumsum(0) - share < top_p) | (torch.arange(len(order)) == 0)
    kept &= probabilities >= min_p * probabilities[0]
    result = torch.zeros_like(probabilities)
    result[order] = probabilities * kept
    return result / result.sum()


def chi_square_excess(observed: Tensor, expected: Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean."""
    common = expected >= 5
    observed = torch.cat([observed[common], observed[~common].sum().view(1)]).double()
    expected = torch.cat([expected[common], expected[~common].sum().view(1)])
    used = expected > 0
    freedom = max(int(used.sum()) - 1, 1)
    statistic = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


def random_logits(vocab: int, scale: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


# Greedy


@given(
    vocab=st.sampled_from([1, 5, 256, 257, 512, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    seed=st.integers(0, 10_000),
    levels=st.integers(1, 40),
)
def test_greedy_takes_the_lowest_id_among_the_largest_logits(
    vocab: int, dtype: torch.dtype, seed: int, levels: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels, (7, vocab), generator=generator).to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits, rows(7, temperature=0.0)).tolist() == expected
    assert sample(logits, rows(7, temperature=0.0)).tolist() == expected
    assert argmax(logits).dtype == torch.int32


def test_greedy_rows_of_a_mixed_batch_are_argmax_and_nothing_is_nan() -> None:
    logits = torch.stack([random_logits(700, seed=seed) for seed in range(6)])
    logits[:, 100:650] = float("-inf")
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.7, 0.0, 1.0])
    for settings in ({}, {"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.1}):
        ids = sample(logits, rows(6, temperature=temperature, **settings))
        assert ids[[0, 2, 4]].tolist() == logits[[0, 2, 4]].argmax(-1).tolist()
        assert torch.isfinite(logits[[1, 3, 5], ids[[1, 3, 5]].long()]).all()


@pytest.mark.parametrize("settings", [{}, {"top_k": 50}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_a_row_without_any_allowed_token_gets_none(settings: dict[str, Any]) -> None:
    assert sample(torch.full((3, 300), float("-inf")), rows(3, **settings)).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-10, 1e-38])
def test_a_tiny_temperature_is_argmax(dtype: torch.dtype, temperature: float) -> None:
    logits = (torch.rand(16, 1000, generator=torch.Generator().manual_seed(1)) * 120 - 60).to(dtype)
    logits[torch.arange(16), torch.arange(16) * 50] = 61  # one clear winner a row
    for settings in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        ids = sample(logits, rows(16, temperature=temperature, positions=torch.arange(16), **settings))
        assert ids.tolist() == (torch.arange(16) * 50).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{"top_p": 1e-4}, {"top_p": 1e-8}, {"top_p": 1e-45}, {"top_k": 1}])
def test_a_tiny_top_p_and_a_top_k_of_one_are_argmax_even_among_equals(
    dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    logits = (torch.rand(16, 1000, generator=torch.Generator().manual_seed(1)) * 120 - 60).to(dtype).round()
    ids = sample(logits, rows(16, positions=torch.arange(16), **settings))
    assert ids.tolist() == logits.argmax(-1).tolist()


# Filters


@pytest.mark.parametrize("top_k", [0, -1, 400, 500])
def test_top_k_off_or_beyond_the_vocabulary_changes_nothing(top_k: int) -> None:
    logits = random_logits(400)
    assert torch.equal(draw_many(logits, 500, top_k=top_k), draw_many(logits, 500))


@pytest.mark.parametrize("top_k", [2, 7, 63, 64, 65, 300])
def test_top_k_keeps_that_many_tokens(top_k: int) -> None:
    drawn = draw_many(torch.zeros(1000), 4000, top_k=top_k)  # all equal: the lowest ids win
    assert sorted(set(drawn.tolist())) == list(range(top_k))


settings_strategy = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 3, 40, 200, 10_000]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    }
)


@given(
    settings=settings_strategy,
    vocab=st.sampled_from([3, 256, 700, 9000]),
    scale=st.sampled_from([0.01, 1.0, 5.0]),
    seed=st.integers(0, 1000),
)
def test_every_draw_is_a_token_that_the_filters_keep(
    settings: dict[str, Any], vocab: int, scale: float, seed: int
) -> None:
    logits = random_logits(vocab, scale, seed)
    drawn = draw_many(logits, 64, **settings)
    assert (filtered(logits, **settings)[drawn.long()] > 0).all()


@given(
    settings=settings_strategy,
    vocab=st.sampled_from([256, 700, 9000]),
    scale=st.sampled_from([0.01, 1.0, 5.0]),
    seed=st.integers(0, 1000),
)
def test_a_draw_is_the_first_chunk_to_finish_and_then_its_first_token(
    settings: dict[str, Any], vocab: int, scale: float, seed: int
) -> None:
    logits = random_logits(vocab, scale, seed)
    drawn = draw_many(logits, 64, **settings)
    keys = row_keys(torch.zeros(64, dtype=torch.int64), torch.arange(64))
    odds = torch.nn.functional.pad(filtered(logits, **settings), (0, -vocab % 256)).view(-1, 256)
    chunk_noise = exponential_noise(keys, -1 - torch.arange(len(odds), dtype=torch.int32))
    chunk = (odds.sum(-1) / chunk_noise.double()).argmax(-1)
    token_noise = exponential_noise(keys, torch.arange(odds.numel(), dtype=torch.int32))
    token_noise = token_noise.view(64, -1, 256)[torch.arange(64), chunk]
    expected = chunk * 256 + (odds[chunk] / token_noise.double()).argmax(-1)
    assert drawn.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_k": 100},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 200, "top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
def test_frequencies_follow_the_filtered_distribution(settings: dict[str, Any]) -> None:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    logits, count = random_logits(600, 1.5), 10_000
    expected = filtered(logits, **(neutral | settings)) * count
    observed = torch.bincount(draw_many(logits, count, seeds=11, **settings).long(), minlength=600)
    assert observed[expected == 0].sum() == 0
    assert chi_square_excess(observed, expected) < 4


def test_frequencies_hold_over_seeds_as_over_positions() -> None:
    logits, count = random_logits(600, 1.5), 10_000
    drawn = torch.cat(
        [sample(logits.expand(len(s), -1), rows(len(s), seeds=s)) for s in torch.arange(count).split(4096)]
    )
    expected = logits.double().softmax(-1) * count
    assert chi_square_excess(torch.bincount(drawn.long(), minlength=600), expected) < 4


def test_consecutive_draws_of_a_row_are_independent() -> None:
    drawn = draw_many(torch.zeros(12), 10_000).long()
    pairs = torch.bincount(drawn[:-1] * 12 + drawn[1:], minlength=144)
    assert chi_square_excess(pairs, torch.full((144,), pairs.sum() / 144)) < 4


# Bans and padding


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.9}])
def test_ids_that_the_tokenizer_does_not_know_are_never_chosen(settings: dict[str, Any]) -> None:
    logits = random_logits(320).expand(64, -1).clone()
    logits[:, 310] = 50.0
    ids = sample(logits, rows(64, positions=torch.arange(64), num_valid_ids=300, **settings))
    assert ids.max() < 300


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 2}])
def test_banned_ids_are_left_out_in_their_row_alone(settings: dict[str, Any]) -> None:
    logits = torch.zeros(4, 300)
    logits[:, 7], logits[:, 9], logits[:, 11] = 80.0, 40.0, 20.0
    banned_ids = torch.tensor([[-1, -1, -1], [7, 5000, -1], [-1, 9, -1], [9, 300, 7]], dtype=torch.int32)
    before, out = logits.clone(), torch.full((4,), -5, dtype=torch.int32)
    assert sample(logits, rows(4, banned=banned_ids, **settings), out) is out
    assert out.tolist() == [7, 9, 7, 11]
    assert torch.equal(logits, before)


# A draw knows nothing of its batch


row_strategy = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([0, 0, 1, 5, 100]),
    st.sampled_from([1.0, 1.0, 0.3, 0.9, 0.9999]),
    st.sampled_from([0.0, 0.0, 0.1]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 100_000),
)


def column_wise(settings: list[tuple[Any, ...]]) -> dict[str, Any]:
    return {name: [row[i] for row in settings] for i, name in enumerate(COLUMNS)}


@given(
    settings=st.lists(row_strategy, min_size=2, max_size=9),
    vocab=st.sampled_from([5, 256, 777, 5000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
    random=st.randoms(use_true_random=False),
)
def test_a_row_gets_the_same_token_alone_in_any_batch_and_in_any_place(
    settings: list[tuple[Any, ...]], vocab: int, dtype: torch.dtype, seed: int, random: Any
) -> None:
    count = len(settings)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype)
    together = sample(logits, rows(count, **column_wise(settings))).tolist()
    alone = [sample(logits[i : i + 1], rows(1, **column_wise([settings[i]])))[0].item() for i in range(count)]
    order = random.sample(range(count), random.randint(1, count))
    shuffled = sample(logits[order], rows(len(order), **column_wise([settings[i] for i in order]))).tolist()
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_the_number_of_threads_does_not_change_a_draw() -> None:
    logits = torch.randn(9, 20_001, generator=torch.Generator().manual_seed(3)).bfloat16()
    settings = rows(9, top_k=torch.tensor([0, 0, 5, 0, 0, 9, 0, 0, 0]), top_p=torch.linspace(0.2, 1, 9))
    threads = torch.get_num_threads()
    try:
        drawn = []
        for count in (1, 2):
            torch.set_num_threads(count)
            drawn.append(
                [
                    sample(logits, settings).tolist(),
                    *(sample(logits[i : i + 1], one_row(settings, i)).item() for i in range(9)),
                ]
            )
    finally:
        torch.set_num_threads(threads)
    assert drawn[0] == drawn[1]
    assert drawn[0][0] == drawn[0][1:]


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    sample(torch.zeros(4, 300), rows(4, top_p=torch.tensor([1.0, 0.5, 0.5, 1.0])))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("vocab", [200, 1000])
def test_off_the_cpu_nothing_waits_for_values(vocab: int) -> None:
    settings = rows(4, temperature=torch.tensor([0.0, 1.0, 1.0, 1.0]), top_k=3, num_valid_ids=190)
    there = settings._replace(**{name: getattr(settings, name).to("meta") for name in COLUMNS})
    ids = sample(
        torch.empty(4, vocab, dtype=torch.bfloat16, device="meta"), there
    )  # meta tensors have no values
    assert (ids.shape, ids.dtype) == ((4,), torch.int32)


@pytest.mark.gpu
def test_the_gpu_draws_the_same_tokens_as_the_cpu() -> None:
    settings = rows(
        64,
        temperature=torch.tensor([0.0, 0.5, 1.0, 2.0] * 16),
        top_k=torch.tensor([0] * 32 + [40] * 16 + [0] * 16),
        top_p=torch.tensor([1.0] * 40 + [0.9] * 24),
        min_p=torch.tensor([0.0, 0.0, 0.05, 0.0] * 16),
        seeds=torch.arange(64),
        positions=torch.arange(64) * 7,
    )
    logits = torch.randn(64, 49_152, generator=torch.Generator().manual_seed(5)).bfloat16() * 2
    there = settings._replace(**{name: getattr(settings, name).cuda() for name in COLUMNS})
    assert sample(logits.cuda(), there).tolist() == sample(logits, settings).tolist()
