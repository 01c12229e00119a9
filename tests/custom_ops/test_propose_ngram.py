"""lamina::propose_ngram: drafts are what came after the longest, latest match, as a plain search finds it."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import ShapeError
from lamina.custom_ops import propose_ngram
from lamina.custom_ops._shared.registry import providers, select

CPU = torch.device("cpu")
NAMES = ("cpu", "reference")
any_provider = pytest.mark.parametrize("provider", NAMES)


def searched(known: list[int], min_ngram: int, max_ngram: int, k: int) -> list[int]:
    """What the op promises, by its words."""
    end = len(known) - 1
    best, longest = -1, min_ngram - 1
    for place in reversed(range(end)):
        length = 0
        while length < min(max_ngram, place + 1) and known[place - length] == known[end - length]:
            length += 1
        if length > longest:
            best, longest = place, length
    if best < 0:
        return [-1] * k
    return [known[best + 1 + i % (end - best)] for i in range(k)]


def paged(rows: list[list[int]], block_size: int, max_blocks: int) -> dict[str, Any]:
    """Rows of tokens in blocks that lie in any order, the newest of each apart."""
    count = sum(max_blocks for _ in rows) + 1
    tokens = torch.full((count, block_size), 7, dtype=torch.int32)  # what was there before
    tables = 1 + torch.randperm(count - 1)[: len(rows) * max_blocks].view(len(rows), max_blocks).int()
    for table, row in zip(tables, rows, strict=True):
        for place, token in enumerate(row[:-1]):
            tokens[table[place // block_size], place % block_size] = token
    lengths = torch.tensor([len(row) - 1 for row in rows], dtype=torch.int32)
    newest = torch.tensor([row[-1] for row in rows], dtype=torch.int32)
    return {"tokens": tokens, "block_tables": tables, "num_computed": lengths, "newest": newest}


def proposed(provider: str, rows: list[list[int]], *, block_size: int, ngram: tuple[int, int], k: int) -> Any:
    call = select("propose_ngram", device=CPU, dtype=torch.int32, provider=provider).call
    out = torch.full((len(rows), k), -7, dtype=torch.int32)
    max_blocks = max(len(row) for row in rows) // block_size + 2
    call(*paged(rows, block_size, max_blocks).values(), *ngram, out)
    return out.tolist()


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4),
    block_size=st.integers(1, 8),
    ngram=st.tuples(st.integers(1, 5), st.integers(0, 5)),
    k=st.integers(1, 7),
)
def test_drafts_are_what_a_plain_search_finds(
    rows: list[list[int]], block_size: int, ngram: tuple[int, int], k: int
) -> None:
    least, most = ngram[0], ngram[0] + ngram[1]
    wanted = [searched(row, least, most, k) for row in rows]
    for provider in NAMES:
        assert proposed(provider, rows, block_size=block_size, ngram=(least, most), k=k) == wanted


@any_provider
def test_the_longest_match_is_taken_and_of_several_the_last(provider: str) -> None:
    rows = [[1, 2, 3, 9, 2, 3, 8, 2, 3, 7, 1, 2, 3], [5, 1, 2, 6, 1, 2, 7, 1, 2]]
    assert proposed(provider, rows, block_size=4, ngram=(2, 3), k=2) == [[9, 2], [7, 1]]


@any_provider
def test_a_repetition_goes_on_as_it_began(provider: str) -> None:
    rows = [[4, 5, 6, 4, 5, 6], [3, 8, 8, 8]]
    assert proposed(provider, rows, block_size=2, ngram=(1, 8), k=7) == [[4, 5, 6, 4, 5, 6, 4], [8] * 7]


@any_provider
def test_where_too_few_tokens_came_before_nothing_is_drafted(provider: str) -> None:
    rows = [[1, 2, 3, 4, 2], [1], [1, 1]]
    assert proposed(provider, rows, block_size=4, ngram=(2, 4), k=3) == [[-1] * 3] * 3


@any_provider
def test_no_rows_and_no_columns_are_no_work(provider: str) -> None:
    assert proposed(provider, [[1, 2, 1]], block_size=4, ngram=(1, 4), k=0) == [[]]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokens": torch.zeros(4, 2)}, "tokens is"),
        ({"block_tables": torch.zeros(1, 2, dtype=torch.int64)}, "block_tables is"),
        ({"num_computed": torch.zeros(2, dtype=torch.int32)}, "num_computed has 2 rows"),
        ({"newest": torch.zeros(1, 1, dtype=torch.int32)}, "newest is"),
        ({"out": torch.zeros(3, 2, dtype=torch.int32).T[:1]}, "out is"),
        ({"min_ngram": 0}, "min_ngram is 0"),
        ({"min_ngram": 5}, "min_ngram is 5 and max_ngram 4"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    fitting = {**paged([[1, 2, 1]], 2, 2), "min_ngram": 1, "max_ngram": 4, "out": torch.zeros(1, 3).int()}
    with pytest.raises(ShapeError, match=message):
        propose_ngram(**fitting | change)


def test_every_provider_that_runs_here_is_tested() -> None:
    assert set(providers("propose_ngram")) == {"cuda", "triton", *NAMES}


def test_opcheck() -> None:
    arguments = (*paged([[1, 2, 1, 2]], 2, 3).values(), 1, 4, torch.zeros(1, 3, dtype=torch.int32))
    torch.library.opcheck(torch.ops.lamina.propose_ngram.default, arguments)
