"""The running requests with their counts side by side: a step of all of them is a few array operations."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .request import Request
from .sampling_params import SamplingParams
from .scheduler_output import ON_HOST, SAMPLING, Adjusted, Banned, Flags, Ints, Said

NO_SLOT = -1  # of a request whose tokens the device need not keep
LARGEST_TOP_K = 2**31 - 1
COUNTS = (
    "computed",  # tokens in the cache once every step launched so far is over
    "known",  # tokens the host has read, the prompt's included
    "total",  # the same and those that steps sample which were launched and not yet read
    "limit",  # tokens it may have in all
    "num_prompt",
    "to_fill",  # tokens it had when it got its row: until they are computed, it catches up
    "may_stop",  # tokens from which on the next one may be an id that stops
    "newest",  # the last token the host has read
    "place",  # of its token among the samples of the last step launched, or ON_HOST
    "last_step",  # launched with a part of it
    "blocks",  # in its table
    "sent",  # of them, how many the device has in the row's table
    "most_blocks",  # that it may come to have
    "slot",  # where the device keeps its tokens, or NO_SLOT
    "told",  # of them, how many it has
    "reports",  # whether log-probabilities are wanted
    "serial",  # of what has the row: another one each time that a request gets a row, 0 for nothing
)


class Rows:
    """Requests in no order; row i is row i of the arena, and of every column here.

    A request keeps its row for as long as it has one, unless one before it leaves and it is the last: then it
    takes that place, so that there is no gap. So whoever comes and goes changes nothing for the others.
    """

    def __init__(self, max_num_rows: int) -> None:
        self._counts = np.zeros((len(COUNTS), max_num_rows), np.int64)
        (
            self.computed,
            self.known,
            self.total,
            self.limit,
            self.num_prompt,
            self.to_fill,
            self.may_stop,
            self.newest,
            self.place,
            self.last_step,
            self.blocks,
            self.sent,
            self.most_blocks,
            self.slot,
            self.told,
            self.reports,
            self.serial,
        ) = self._counts
        self.sampling = np.zeros(max_num_rows, SAMPLING)
        # The same memory in words: numpy copies structured arrays field by field.
        self._sampling_words = self.sampling.view(np.int64).reshape(max_num_rows, -1)
        self.requests: list[Request] = []
        self._ids: list[str] = []
        self._free_slots = list(range(max_num_rows))[::-1]  # the lowest last
        self._num_serials = 0
        self._changed()

    def __len__(self) -> int:
        return len(self.requests)

    def append(
        self, request: Request, *, blocks: int, most_blocks: int, computed: int = 0, in_flight: int = 0
    ) -> None:
        """A row for a request."""
        row = request.row = len(self.requests)
        self.requests.append(request)
        self._ids.append(request.request_id)
        self._changed()
        self._num_serials += 1
        num_prompt, num_tokens = len(request.prompt_token_ids), request.num_tokens
        newest = request.output_token_ids[-1] if request.output_token_ids else request.prompt_token_ids[-1]
        self._counts[:, row] = (
            computed,
            num_tokens,
            num_tokens + in_flight,
            request.max_total_tokens,
            num_prompt,
            num_tokens,
            num_prompt + request.params.min_tokens,
            newest,
            ON_HOST,
            request.last_step,
            blocks,
            0,
            most_blocks,
            self._free_slots.pop() if request.params.adjusts else NO_SLOT,
            0,
            request.params.wants_reports,
            self._num_serials,
        )
        self.sampling[row] = first_choice(request.params)

    def remove(self, rows: Iterable[int]) -> None:
        """Take requests out; the last ones take their places."""
        for row in sorted(rows, reverse=True):
            request = self.requests[row]
            request.last_step = int(self.last_step[row])
            request.num_computed = int(self.computed[row])
            self._free_slot(row)
            last = len(self) - 1
            if row < last:
                self._exchange(row, last)
            request.row = -1
            self.serial[last] = 0
            del self.requests[last], self._ids[last]
        self._changed()

    def put_first(self, counts: Ints) -> Ints:
        """Let rows with a count come before all others, moving as few as can be; returns their counts."""
        chosen = counts > 0
        num = int(chosen.sum())
        others, late = np.flatnonzero(~chosen[:num]), num + np.flatnonzero(chosen[num:])
        for row, other in zip(others.tolist(), late.tolist(), strict=True):
            self._exchange(row, other)
        self._changed()
        first = counts[:num].copy()
        first[others] = counts[late]
        return first

    def _exchange(self, row: int, other: int) -> None:
        """Two requests change places; of their tables the device knows nothing then."""
        pair, turned = [row, other], [other, row]
        self._counts[:, pair] = self._counts[:, turned]
        self._sampling_words[pair] = self._sampling_words[turned]
        self.sent[pair] = 0
        requests, ids = self.requests, self._ids
        requests[row], requests[other] = requests[other], requests[row]
        ids[row], ids[other] = ids[other], ids[row]
        requests[row].row, requests[other].row = row, other

    def check(self, in_flight: Mapping[Request, int]) -> None:
        """Every column says what the requests do; for tests."""
        assert [request.row for request in self.requests] == list(range(len(self)))
        assert [request.request_id for request in self.requests] == list(self.request_ids(len(self)))
        for row, request in enumerate(self.requests):
            known, flying = request.num_tokens, in_flight[request]
            assert (self.known[row], self.total[row]) == (known, known + flying), request
            assert self.computed[row] < known + flying < self.limit[row] == request.max_total_tokens, request
            assert self.newest[row] == request.token_ids(known - 1, known)[0], request
            assert self.sent[row] <= self.blocks[row] <= self.most_blocks[row], request
            assert self.told[row] <= known + flying, request
            assert (self.slot[row] != NO_SLOT) == request.params.adjusts, request
            assert self.reports[row] == request.params.wants_reports == (row in self.reporters), request
            assert self.sampling[row].item() == np.array(first_choice(request.params), SAMPLING).item()
        serials = self.serial[: len(self)].tolist()
        assert len({*serials, 0}) == len(self) + 1, "two rows have the same serial"
        assert not self.serial[len(self) :].any(), "a row without a request has a serial"
        used = self.slot[: len(self)][self.slot[: len(self)] != NO_SLOT].tolist()
        assert sorted(used + self._free_slots) == list(range(len(self.slot))), "a slot was lost or kept"

    def clear(self) -> None:
        """Nobody runs."""
        for request in self.requests:
            request.row = -1
        self.requests = []
        self._ids = []
        self.serial[:] = 0
        self._free_slots = list(range(len(self.slot)))[::-1]
        self._changed()

    def _changed(self) -> None:
        """Drop what is remembered of the rows as a whole."""
        self._request_ids: tuple[str, ...] | None = None
        self._all_sampling: NDArray[np.void] | None = None
        self._slotted: Ints | None = None
        self._reporters: list[int] | None = None
        self._may_be_early: bool | None = None
        self._by_rank: Ints | None = None

    def _free_slot(self, row: int) -> None:
        if self.slot[row] != NO_SLOT:
            self._free_slots.append(int(self.slot[row]))
            self._free_slots.sort(reverse=True)  # slots far up make the device keep room for those below

    @property
    def slotted(self) -> Ints:
        """The rows whose logits are adjusted; the same array while nothing changes."""
        if self._slotted is None:
            self._slotted = np.flatnonzero(self.slot[: len(self)] != NO_SLOT)
        return self._slotted

    @property
    def need_tokens(self) -> bool:
        """Whether any is adjusted by code of the host's, which has to know every token before the next."""
        return any(self.requests[row].params.logits_processors for row in self.slotted.tolist())

    @property
    def reporters(self) -> list[int]:
        """The rows of which log-probabilities are wanted; the same list while nothing changes."""
        if self._reporters is None:
            self._reporters = np.flatnonzero(self.reports[: len(self)]).tolist()
        return self._reporters

    def request_ids(self, num: int) -> tuple[str, ...]:
        """Whose the first rows are; the same tuple while nothing changes."""
        if self._request_ids is None:
            self._request_ids = tuple(self._ids)
        return self._request_ids if num == len(self) else self._request_ids[:num]

    def sampling_of(self, samples: Flags) -> NDArray[np.void]:
        """What the flagged of the first rows are sampled with; one array while all are, unchanged."""
        if len(samples) < len(self) or not samples.all():
            return self._sampling_words[: len(samples)][samples].view(SAMPLING)[:, 0]
        if self._all_sampling is None:
            self._all_sampling = self._sampling_words[: len(self)].copy().view(SAMPLING)[:, 0]
        return self._all_sampling

    @property
    def by_rank(self) -> Ints:
        """All rows in order of their requests' ranks; the same array while nothing changes."""
        if self._by_rank is None:
            ranked = sorted(range(len(self)), key=lambda row: self.requests[row].rank)
            self._by_rank = np.array(ranked, np.int64)
        return self._by_rank

    def out_of_reach(self) -> Flags | None:
        """Rows whose newest token neither the host has read nor the last step sampled; None for none."""
        num = len(self)
        lost = self.place[:num] == ON_HOST
        if lost.any():
            lost &= self.total[:num] > self.known[:num]
        return lost if lost.any() else None

    def find(self, requests: Sequence[Request], serials: Ints) -> Ints:
        """The row that each of these has now, -1 for none; they had the first rows, with these serials."""
        rows = np.arange(len(requests))
        for row in np.flatnonzero(self.serial[: len(rows)] != serials).tolist():
            rows[row] = requests[row].row
        return rows

    def token_ids(self, counts: Ints, sources: Ints) -> NDArray[np.int32]:
        """So many uncomputed tokens of each of the first rows, row after row; 0 for one not on the host."""
        num = len(counts)
        newest = np.where(sources == ON_HOST, self.newest[:num], 0).astype(np.int32)
        is_newest = self.total[:num] - self.computed[:num] == 1
        if is_newest.all():
            return newest
        ends = np.cumsum(counts)
        token_ids = np.zeros(ends[-1], np.int32)
        token_ids[ends[is_newest] - 1] = newest[is_newest]
        for row in np.flatnonzero(~is_newest).tolist():
            start, count, end = int(self.computed[row]), int(counts[row]), int(ends[row])
            token_ids[end - count : end] = self.requests[row].token_ids(start, start + count)
        return token_ids

    def banned(self, samples: Flags) -> Banned:
        """Ids that the samples of the first rows must not be: those that stop, until min_tokens have come."""
        num = len(samples)
        if self._may_be_early is None:
            self._may_be_early = bool((self.total[: len(self)] < self.may_stop[: len(self)]).any())
        if not self._may_be_early:  # nor will it be, before another comes
            return ()
        early = samples & (self.total[:num] < self.may_stop[:num])
        if not early.any():
            return ()
        places = np.cumsum(samples) - 1
        found = ((int(places[row]), self.requests[row].stop_token_ids) for row in np.flatnonzero(early))
        return tuple((place, tuple(sorted(ids))) for place, ids in found if ids)

    def adjusted(self, samples: Flags) -> Adjusted | None:
        """What is to be adjusted of the samples of the first rows, taken as told from now on."""
        if not len(self.slotted):
            return None
        rows = self.slotted[: np.searchsorted(self.slotted, len(samples))]
        rows = rows[samples[rows]]
        if not len(rows):
            return None
        requests = [self.requests[row] for row in rows.tolist()]
        total = self.total[rows]
        missed = []
        for row in rows[self.told[rows] < total - 1].tolist():
            told, known = int(self.told[row]), int(self.known[row])
            missed.append((int(self.slot[row]), told, self.requests[row].token_ids(told, known)))
        self.told[rows] = total
        return Adjusted(
            samples=(np.cumsum(samples) - 1)[rows],
            params=tuple(request.params for request in requests),
            num_prompt=self.num_prompt[rows],
            slots=self.slot[rows],
            missed=tuple(missed),
            longest=int(total.max()),
            said=tuple(
                Said(
                    which=which,
                    request_id=request.request_id,
                    prompt=request.prompt_token_ids,
                    answer=tuple(request.output_token_ids),
                )
                for which, request in enumerate(requests)
                if request.params.logits_processors
            ),
        )


SamplingRow = tuple[float, int, float, float, int]


def sampling_row(params: SamplingParams) -> SamplingRow:
    """Resolved parameters as a row of SAMPLING."""
    values: tuple[Any, ...] = params.temperature, params.top_k, params.top_p, params.min_p, params.seed
    assert None not in values, "unresolved parameters"
    temperature, top_k, top_p, min_p, seed = values
    return temperature, min(max(top_k, 0), LARGEST_TOP_K), top_p, min_p, seed


def first_choice(params: SamplingParams) -> SamplingRow:
    """What a row is sampled with by the step itself: as cheaply as can be where it is chosen anew."""
    return (0.0, *sampling_row(params)[1:]) if params.adjusts else sampling_row(params)
