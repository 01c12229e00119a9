"""Filters: the same tokens are kept by ranking a few candidates as by sorting everything."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.custom_ops.sample._numpy import CANDIDATES, Filtered, keep, keep_all, keep_by_ranking
from lamina.custom_ops.sample.reference import CHUNK, kept_odds


def random_gaps(num_rows: int, chunks: int, seed: int, step: float, width: float) -> Tensor:
    """Gaps of rows whose logits are multiples of `step`, so that many are equal."""
    logits = torch.randn(num_rows, chunks * CHUNK, generator=torch.Generator().manual_seed(seed)) * width
    logits = (logits / step).round() * step
    return logits.amax(dim=-1, keepdim=True) - logits


def columns(
    num_rows: int, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.as_tensor(top_k, dtype=torch.int32).expand(num_rows),
        torch.as_tensor(top_p, dtype=torch.float32).expand(num_rows),
        torch.as_tensor(min_p, dtype=torch.float32).expand(num_rows),
    )


def kept_ids(kept: Filtered, gaps: Tensor) -> list[list[int]]:
    ids = torch.arange(gaps.shape[1], dtype=torch.int32)
    ones = kept.apply(torch.ones_like(gaps), gaps, ids)
    return [row.nonzero().flatten().tolist() for row in ones]


def ids_of(odds: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in odds]


row_settings = st.tuples(
    st.sampled_from([-1, 0, 1, 2, 50, 300, 1024, 5000, 100_000]),
    st.sampled_from([1e-8, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.0, 0.01, 0.4, 1.0]),
)


@given(
    settings=st.lists(row_settings, min_size=1, max_size=5),
    chunks=st.sampled_from([1, 4, 40]),
    seed=st.integers(0, 1000),
    step=st.sampled_from([1e-6, 0.0625, 1.0]),
    width=st.sampled_from([0.1, 1.0, 4.0]),
)
def test_ranking_keeps_what_sorting_keeps(
    settings: list[tuple[int, float, float]], chunks: int, seed: int, step: float, width: float
) -> None:
    gaps = random_gaps(len(settings), chunks, seed, step, width)
    filters = columns(len(settings), *zip(*settings, strict=True))
    ranked, odds = keep_by_ranking(gaps, *filters), kept_odds(gaps, *filters)
    assert kept_ids(ranked, gaps) == kept_ids(keep(gaps, *filters), gaps) == ids_of(odds)
    torch.testing.assert_close(ranked.masses, odds.view(len(settings), -1, CHUNK).sum(-1))


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.99])
def test_a_nucleus_larger_than_the_first_candidates_is_found(top_p: float) -> None:
    gaps = random_gaps(2, 160, seed=3, step=1e-6, width=0.3)
    filters = columns(2, top_p=top_p)
    expected = ids_of(kept_odds(gaps, *filters))
    assert len(expected[0]) > CANDIDATES
    assert kept_ids(keep_by_ranking(gaps, *filters), gaps) == expected


def test_among_equals_the_lowest_ids_are_kept() -> None:
    gaps = torch.zeros(1, 2 * CHUNK)
    gaps[0, 5] = 1.0
    filters = columns(1, top_k=7)
    expected = [[0, 1, 2, 3, 4, 6, 7]]
    assert kept_ids(keep_by_ranking(gaps, *filters), gaps) == ids_of(kept_odds(gaps, *filters)) == expected


def test_masses_are_the_summed_odds_of_kept_tokens() -> None:
    gaps = random_gaps(3, 4, seed=1, step=0.5, width=2.0)
    for kept in (keep_all(gaps), keep_by_ranking(gaps, *columns(3, top_k=9))):
        odds = kept.apply(gaps.neg().exp(), gaps, torch.arange(gaps.shape[1], dtype=torch.int32))
        torch.testing.assert_close(kept.masses, odds.view(3, 4, CHUNK).sum(-1))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_of_broken_logits_disturbs_no_other(broken: float) -> None:
    logits = torch.randn(3, 2 * CHUNK, generator=torch.Generator().manual_seed(0))
    logits[1, 17] = broken
    gaps = logits.amax(dim=-1, keepdim=True) - logits
    filters = columns(3, top_k=5, top_p=0.9)
    kept = kept_ids(keep(gaps, *filters), gaps)
    for row in (0, 2):
        alone = gaps[row : row + 1]
        assert kept[row] == kept_ids(keep(alone, *(column[:1] for column in filters)), alone)[0]
