"""The noise behind draws: uniform, independent along seeds, positions, ids and the stages of a race."""

import functools
import math

import pytest
import torch
from torch import Tensor

from lamina.custom_ops.sample.reference import exponential_noise, row_keys


def deviation(counts: Tensor) -> float:
    """How many standard deviations the chi-square statistic of equally likely cells lies above its mean."""
    expected, freedom = counts.sum().item() / len(counts), len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@functools.cache
def noise_grid(axis: str, count: int = 2048) -> Tensor:
    """Uniform numbers [count, count] with neighbouring seeds, positions or token ids along the last axis."""
    zeros, steps = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    if axis == "ids":
        noise = exponential_noise(row_keys(steps, zeros), torch.arange(count, dtype=torch.int32))
    else:
        keys = row_keys(steps, zeros) if axis == "seeds" else row_keys(zeros, steps)
        noise = exponential_noise(keys, torch.arange(count, dtype=torch.int32)).T
    return (-noise).exp()


@pytest.mark.parametrize("axis", ["seeds", "positions", "ids"])
def test_noise_is_uniform_and_its_neighbours_are_independent(axis: str) -> None:
    uniform = noise_grid(axis)
    bins = (uniform * 64).long().clamp_(max=63)
    counts = torch.bincount(bins.flatten(), minlength=64)
    assert deviation(counts) < 4
    for distance in (1, 2, 3, 16, 256):
        coarse = bins // 4
        pairs = (coarse[:, :-distance] * 16 + coarse[:, distance:]).flatten()
        counts = torch.bincount(pairs, minlength=256)
        assert deviation(counts) < 4


@pytest.mark.parametrize("axis", ["seeds", "positions", "ids"])
def test_every_line_of_noise_is_as_even_as_chance_and_no_evener(axis: str) -> None:
    bins = (noise_grid(axis) * 32).long().clamp_(max=31)
    counts = torch.zeros(len(bins), 32).scatter_add_(1, bins, torch.ones(bins.shape))
    statistic = ((counts - 64) ** 2 / 64).sum(-1)  # chi-square with 31 degrees of freedom, 2048 times
    assert abs(statistic.mean().item() - 31) < 1
    assert abs(statistic.var().item() / 62 - 1) < 0.2


def test_small_noise_which_decides_races_has_the_right_frequency() -> None:
    noise = exponential_noise(
        row_keys(torch.arange(1024), torch.arange(1024)), torch.arange(8192, dtype=torch.int32)
    )
    for exponent in (4, 8, 12, 16):
        count, expected = int((noise < 2.0**-exponent).sum()), noise.numel() * -math.expm1(-(2.0**-exponent))
        assert abs(count - expected) < 4 * math.sqrt(expected)
    assert noise.min() > 0
    assert noise.max() < 22.2


@pytest.mark.parametrize("ids", [(0, 256, 512, 1, 257), (3, 17, 300, 411, 590), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_the_two_stages_of_a_race_are_independent_of_each_other(ids: tuple[int, ...], axis: str) -> None:
    runs, draws, odds = 250, 4000, torch.tensor([0.4, 0.25, 0.15, 0.12, 0.08])
    steps = torch.arange(runs * draws)
    zeros = torch.zeros_like(steps)
    keys = row_keys(steps, zeros) if axis == "seeds" else row_keys(zeros, steps)
    chunk = torch.tensor(ids) // 256
    masses = torch.zeros(3).index_add_(0, chunk, odds)
    winner = (masses / exponential_noise(keys, torch.tensor([-1, -2, -3], dtype=torch.int32))).argmax(-1)
    scores = odds / exponential_noise(keys, torch.tensor(ids, dtype=torch.int32))
    drawn = scores.masked_fill_(chunk != winner.unsqueeze(-1), -1.0).argmax(-1).view(runs, draws)
    counts = torch.nn.functional.one_hot(drawn, 5).sum(1).double()
    statistic = ((counts - odds * draws) ** 2 / (odds * draws)).sum(-1)  # chi-square, 4 degrees of freedom
    assert abs(statistic.mean().item() - 4) < 4 * math.sqrt(8 / runs)


def test_seed_and_position_zero_give_ordinary_noise() -> None:
    noise = exponential_noise(
        row_keys(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)),
        torch.arange(-256, 256, dtype=torch.int32),
    )
    assert noise.min() > 2.0**-16
    assert abs(noise.mean().item() - 1) < 0.2


def test_keys_differ_in_about_half_their_bits_when_one_bit_of_seed_or_position_flips() -> None:
    seeds, positions = torch.arange(64) * 1_000_003, torch.arange(64) * 17
    base = row_keys(seeds, positions)
    for bit in range(63):
        for other in (row_keys(seeds ^ (1 << bit), positions), row_keys(seeds, positions ^ (1 << bit))):
            flipped = base ^ other
            ones = sum((flipped >> shift & 1).sum().item() for shift in range(32))
            assert 0.45 < ones / (flipped.numel() * 32) < 0.55
