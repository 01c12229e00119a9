"""Rows of several kinds of blocks in one weight: "Q4_K:5120+Q6_K:1024".

Such a weight is uint8 [bytes]: the rows of each run [rows, bytes of a row] behind those of the one before,
interleaved as layout.interleave does it. Of one kind, "Q4_K", it is those rows alone.
"""

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import GROUP, KINDS, by_rows

PATTERN = re.compile(r"\w+:[1-9][0-9]*(\+\w+:[1-9][0-9]*)+")
WHOLE = 256  # columns that are whole blocks of every kind


class Run(NamedTuple):
    """Rows of one kind that follow each other."""

    kind: str
    num_rows: int


def name_of(runs: Iterable[Run]) -> str:
    """What op and layout call rows of these kinds; runs of one kind that follow each other are one."""
    merged: list[Run] = []
    for kind, num_rows in runs:
        if merged and merged[-1].kind == kind:
            num_rows += merged.pop().num_rows
        merged.append(Run(kind, num_rows))
    if len(merged) == 1:
        return merged[0].kind
    return "+".join(f"{kind}:{num_rows}" for kind, num_rows in merged)


@functools.cache
def runs_of(name: str) -> tuple[Run, ...]:
    """The runs of several kinds that a name says, none for one kind. ValueError for other names."""
    if name in KINDS:
        return ()
    pairs = [part.split(":") for part in name.split("+")] if PATTERN.fullmatch(name) else []
    runs = tuple(Run(kind, int(num_rows)) for kind, num_rows in pairs)
    if not runs or not {run.kind for run in runs} <= KINDS.keys():
        raise ValueError(
            f"kind is {name!r}; wanted {', '.join(KINDS)}, or rows of several, like 'Q4_K:64+Q6_K:16'"
        )
    return runs


def num_rows_of(weight: Tensor, name: str) -> int:
    """How many rows a weight has."""
    runs = runs_of(name)
    return sum(run.num_rows for run in runs) if runs else weight.shape[0]


def columns_of(runs: Iterable[Run]) -> int:
    """How many columns are whole blocks of each kind."""
    return max(KINDS[run.kind].columns for run in runs)


def num_bytes(runs: Iterable[Run], columns: int) -> int:
    """What the rows take."""
    return sum(run.num_rows * KINDS[run.kind].row_bytes(columns) for run in runs)


def split(weight: Tensor, name: str) -> list[tuple[str, Tensor]]:
    """Each run's kind and its rows [n, bytes], which are views."""
    runs = runs_of(name)
    if not runs:
        return [(name, weight)]
    columns = weight.numel() * WHOLE // num_bytes(runs, WHOLE)
    parts = torch.split(weight, [num_bytes((run,), columns) for run in runs])
    return [(run.kind, part.view(run.num_rows, -1)) for run, part in zip(runs, parts, strict=True)]


def halves_in_groups(weight: Tensor, name: str) -> bool:
    """Whether each half of the rows, and each run, is whole groups of sixteen."""
    halves = num_rows_of(weight, name) % (2 * GROUP) == 0
    return halves and all(run.num_rows % GROUP == 0 for run in runs_of(name))


def level(weight: Tensor, name: str) -> None:
    """Have blocks of any bits stand for weights of the size of a model's, all of a kind by the same scale."""
    for kind, rows in split(weight, name):
        own = KINDS[kind]
        own.set_heads(rows, 1.0)
        some = own.numbers(by_rows(rows[:GROUP], kind)).dense()
        own.set_heads(rows, float(some.square().mean() * some.shape[1]) ** -0.5)
