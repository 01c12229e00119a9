"""Drafts of the rows of a running batch: how many are in flight, were proposed, and held lately."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol.scheduler_output import ON_HOST, Flags, Ints, SchedulerOutput
from .in_flight import Launched

WHOLE = 1 << 20  # shares are counted in parts of this
UNTRIED = WHOLE // 2  # share of drafts that hold, of a request of which nothing is known
FORGETTING = 512  # steps without drafts in which a share comes back to that, so that they are tried again
DRAFT_COUNTS = (
    "unjudged",  # drafts in steps launched and not yet read: so many more tokens it may have
    "proposed",  # drafts that the last step left for it, as far as is known
    "hold_rate",  # share of its drafts that held lately, in parts of WHOLE
)
FIRST_COUNTS = 0, 0, UNTRIED  # of a request that gets a row


class DraftCounts:
    """The counts of drafts by row, which move with the other columns of the batch."""

    def __init__(self, columns: Mapping[str, Ints]) -> None:
        """columns: all of the batch by name, [max_num_rows] each; DRAFT_COUNTS are written here alone."""
        self._unjudged, self._proposed, self._hold_rate = (columns[name] for name in DRAFT_COUNTS)
        self._computed, self._total, self._limit = (columns[name] for name in ("computed", "total", "limit"))
        self._blocks, self._place, self._last_step = (columns[n] for n in ("blocks", "place", "last_step"))
        self._serial = columns["serial"]

    def launch(self, plan: SchedulerOutput) -> None:
        """A plan of the first rows is in flight."""
        num, num_sampled = plan.num_rows, plan.num_sampled_tokens
        if plan.drafts is not None:
            self._proposed[:num] = plan.drafts.num_next
        if len(plan.sampling) > np.count_nonzero(num_sampled):
            self._unjudged[:num] += (num_sampled - 1).clip(0)
        elif plan.drafts is not None:
            self._hold_rate[:num] += (UNTRIED - self._hold_rate[:num]) // FORGETTING

    def judge(self, launched: Launched) -> None:
        """The host has read which of a step's drafts held, wherever their rows are now."""
        num_drafts = (launched.plan.num_sampled_tokens - 1).clip(0)
        same = self._serial[: len(num_drafts)] == launched.serials
        self._unjudged[: len(same)] -= np.where(same, num_drafts, 0)
        for place in (~same).nonzero()[0].tolist():
            row = launched.requests[place].row
            if row >= 0 and self._serial[row] == launched.serials[place]:  # it has moved
                self._unjudged[row] -= num_drafts[place]

    def learn(self, launched: Launched, moves: NDArray[np.float64], num_proposed: Ints) -> None:
        """A step is over: by so much its rows' shares of drafts that hold move, and so many are proposed."""
        num = len(num_proposed)
        same = self._serial[:num] == launched.serials
        self._hold_rate[:num] += np.where(same, moves * WHOLE, 0).astype(np.int64)
        is_last = same & (self._last_step[:num] == launched.plan.step)
        np.copyto(self._proposed[:num], num_proposed, where=is_last)

    def most_tokens(self, rows: slice | int, num_drafts: Ints | int = 0) -> Any:
        """Tokens of these rows that may have to be in the cache, if every draft holds, these among them.

        The last token that a request may have is never computed.
        """
        return np.minimum(self._total[rows] + self._unjudged[rows] + num_drafts, self._limit[rows] - 1)

    def short_of_blocks(self, num: int, block_size: int, num_drafts: Ints | int = 0) -> Ints:
        """Of so many rows, which is all, those whose block tables lack blocks, once for each that they lack.

        num_drafts: to be computed beyond the newest token, of all rows or of each [rows].
        """
        needed = self.most_tokens(slice(num), num_drafts)
        short: Ints = (needed > self._blocks[:num] * block_size).nonzero()[0]
        return np.repeat(short, -(-needed[short] // block_size) - self._blocks[short])

    def have_drafts(self, num: int) -> Flags:
        """Which of the first rows the last step left drafts for, that come after all of their tokens."""
        is_next: Flags = self._total[:num] - self._computed[:num] == 1
        has_any: Flags = (self._place[:num] != ON_HOST) & (self._proposed[:num] > 0)
        return is_next & has_any

    def places(self, num: int) -> Ints:
        """Of each of the first rows which one of the last step launched it was, or ON_HOST; [num]."""
        return self._place[:num]

    def useful(self, num: int) -> Ints:
        """Drafts of each of the first rows that may be of use, [num]."""
        useful: Ints = np.minimum(self._proposed[:num], self._limit[:num] - 1 - self._total[:num])
        return useful

    def capacities(self, num: int, block_size: int) -> Ints:
        """Tokens that the blocks of each of the first rows have room for."""
        capacities: Ints = self._blocks[:num] * block_size
        return capacities

    def limits(self, num: int) -> Ints:
        """Tokens that each of the first rows may have in all, a copy [num]."""
        return self._limit[:num].copy()

    def hold_rates(self, num: int) -> NDArray[np.float64]:
        """The share of drafts that held lately, of each of the first rows."""
        rates: NDArray[np.float64] = self._hold_rate[:num] / WHOLE
        return rates
