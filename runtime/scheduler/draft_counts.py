"""Drafts of the rows of a running batch: how many are in flight, were proposed, and held lately."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import DRAFTS_ON_HOST, NO_DRAFTS, ON_HOST, Flags, Ints, SchedulerOutput
from ..speculation.config import MAX_DRAFTS
from .in_flight import Launched

WHOLE = 1 << 20  # shares are counted in parts of this
WEIGHT = 1 / 8  # of the newest step in the share of a request's drafts that hold
UNTRIED = WHOLE // 2  # share of drafts that hold, of a request of which nothing is known
FORGETTING = 512  # steps without drafts in which a share comes back to that, so that they are tried again
DRAFT_IDS = tuple(f"draft_{place}" for place in range(MAX_DRAFTS))  # of a pipeline alone
DRAFT_COUNTS = (
    "unjudged",  # drafts in steps launched and not yet read: so many more tokens it may have
    "proposed",  # drafts that the last step left for it, as far as is known
    "hold_rate",  # share of its drafts that held lately, in parts of WHOLE
    *DRAFT_IDS,
)
FIRST_COUNTS = 0, 0, UNTRIED, *[NO_DRAFTS] * MAX_DRAFTS  # of a request that gets a row


class DraftCounts:
    """The counts of drafts by row, which move with the other columns of the batch.

    In a pipeline drafts come to the host with the tokens that they follow, and are sent with the next plan.
    """

    def __init__(self, columns: Mapping[str, Ints], are_on_host: bool = False) -> None:
        """columns: all of the batch by name, [max_num_rows] each; DRAFT_COUNTS are written here alone."""
        self._are_on_host = are_on_host
        self._unjudged, self._proposed, self._hold_rate = (columns[name] for name in DRAFT_COUNTS[:3])
        self._ids = [columns[name] for name in DRAFT_IDS]
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
        places, rows = self._places_and_rows(launched)
        self._unjudged[rows] -= num_drafts[places]

    def move_hold_rates(self, launched: Launched, tried: Flags, shares: NDArray[np.float64]) -> None:
        """Such shares of a step's drafts have held, of those of its rows that had any."""
        places, rows = self._places_and_rows(launched)
        rows, shares = rows[tried[places]], shares[places[tried[places]]]
        self._hold_rate[rows] += ((shares * WHOLE - self._hold_rate[rows]) * WEIGHT).astype(np.int64)

    def learn(self, launched: Launched, output: RunnerOutput) -> None:
        """A step is over, whose output says how many drafts it proposes, and perhaps which."""
        assert output.num_proposed is not None, "of a step that nobody drafts for"
        places, rows = self._places_and_rows(launched)
        is_last = self._last_step[rows] == launched.plan.step
        places, rows = places[is_last], rows[is_last]
        self._proposed[rows] = output.num_proposed[places]
        if output.draft_ids is not None:
            draft_ids = output.draft_ids.reshape(launched.plan.num_rows, -1)
            for column, ids in zip(self._ids, draft_ids.T, strict=False):
                column[rows] = ids[places]

    def _places_and_rows(self, launched: Launched) -> tuple[Ints, Ints]:
        """Of a step's rows those whose requests have had a row ever since, and where these are now."""
        num = len(launched.serials)
        same = self._serial[:num] == launched.serials
        if same.all():
            return np.arange(num), np.arange(num)
        rows = np.where(same, np.arange(num), ON_HOST)
        for place in (~same).nonzero()[0].tolist():
            row = launched.requests[place].row
            if row >= 0 and self._serial[row] == launched.serials[place]:  # it has moved
                rows[place] = row
        places = (rows >= 0).nonzero()[0]
        return places, rows[places]

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
        has_any: Flags = self._proposed[:num] > 0
        return is_next & has_any & (self._are_on_host or self._place[:num] != ON_HOST)

    def sources(self, num: int) -> Ints:
        """Where the drafts of the first rows are: in which row of the last step launched; [num]."""
        return np.full(num, DRAFTS_ON_HOST) if self._are_on_host else self._place[:num]

    def put(self, token_ids: NDArray[np.int32], rows: Ints, firsts: Ints, counts: Ints) -> None:
        """Write drafts of these rows among the tokens of a step, where they begin and so many of each."""
        for place in range(int(counts.max(initial=0))):
            chosen = counts > place
            token_ids[firsts[chosen] + place] = self._ids[place][rows[chosen]]

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
