"""The running requests with their counts side by side: a step of all of them is a few array operations."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..protocol.scheduler_output import (
    ON_HOST,
    SAMPLING,
    Adjusted,
    Banned,
    Flags,
    Ints,
    SamplingRow,
    TokenHistory,
    sampling_row,
)
from ..sampling_params import SamplingParams
from .prefix_view import PrefixView
from .request import Request

NO_SLOT = -1  # of a request whose tokens the device need not keep
COUNTS = (
    "computed",  # tokens that are certain to be in the cache once every step launched so far is over
    "total",  # tokens it has, those included that steps launched and not yet read are certain to yield
    "known",  # of them, those that the host has read
    "limit",  # tokens it may have in all
    "num_prompt",
    "newest",  # the last token the host has read
    "place",  # of its token among the samples of the last step launched, or ON_HOST
    "last_step",  # launched with a part of it
    "blocks",  # in its table
    "most_blocks",  # that it may come to have
    "slot",  # where the device keeps its tokens, or NO_SLOT
    "told",  # of them, how many it has
    "serial",  # of what has the row: another one each time that a request gets a row, 0 for nothing
)


class Rows:
    """Requests in no order; row i is row i of the arena, and of every column here.

    A request keeps its row for as long as it has one, unless one before it leaves and it is the last: then it
    takes that place, so that there is no gap. So whoever comes and goes changes nothing for the others.

    What most requests do not have (a prompt to compute, adjusted logits, log-probabilities, min_tokens) is
    kept by those that have it, so that a step without costs nothing.
    """

    def __init__(self, max_num_rows: int) -> None:
        self._counts = np.zeros((len(COUNTS), max_num_rows), np.int64)
        (
            self.computed,
            self.total,
            self.known,
            self.limit,
            self.num_prompt,
            self.newest,
            self.place,
            self.last_step,
            self.blocks,
            self.most_blocks,
            self.slot,
            self.told,
            self.serial,
        ) = self._counts
        self.sampling = np.zeros(max_num_rows, SAMPLING)
        # The same memory in words: numpy copies structured arrays field by field.
        self._sampling_words = self.sampling.view(np.int64).reshape(max_num_rows, -1)
        self._numbers = np.arange(max_num_rows)
        self._num_serials = 0
        self.requests: list[Request] = []
        self.clear()

    def clear(self) -> None:
        """Nobody runs."""
        for request in self.requests:
            request.row = -1
        self.requests = []
        self._ids: list[str] = []
        self.filling: dict[Request, int] = {}  # to be computed up to the token they had when they got a row
        self.untold: dict[Request, None] = {}  # the device has not the whole table in its row
        self._reporting: dict[Request, None] = {}  # log-probabilities are wanted of them
        self._early: dict[Request, None] = {}  # they may not have min_tokens so far
        self._free_slots = list(range(len(self.slot)))[::-1]  # the lowest last
        self.serial[:] = 0
        self._all_in_reach = True
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
        params, num_tokens = request.params, request.num_tokens
        self._counts[:, row] = (
            computed,
            num_tokens + in_flight,
            num_tokens,
            request.max_total_tokens,
            len(request.prompt_token_ids),
            (request.output_token_ids or request.prompt_token_ids)[-1],
            ON_HOST,
            request.last_step,
            blocks,
            most_blocks,
            self._free_slots.pop() if params.adjusts else NO_SLOT,
            0,
            self._num_serials,
        )
        self.sampling[row] = first_choice(params)
        self._all_in_reach &= not in_flight
        self.untold[request] = None
        if computed < num_tokens:
            self.filling[request] = num_tokens
        if params.wants_reports:
            self._reporting[request] = None
        if params.min_tokens:
            self._early[request] = None

    def remove(self, rows: Collection[int]) -> None:
        """Take requests out; the last ones take their places."""
        if not rows:
            return
        for row in sorted(rows, reverse=True):
            request = self.requests[row]
            request.row = -1
            request.last_step = int(self.last_step[row])
            request.num_computed = int(self.computed[row])
            self._free_slot(row)
            for those in (self.untold, self.filling, self._reporting, self._early):
                those.pop(request, None)
            last, own_id = self.requests.pop(), self._ids.pop()
            if last is not request:
                self._put(last, own_id, row)
            self.serial[len(self)] = 0
        self._changed()

    def _put(self, request: Request, request_id: str, row: int) -> None:
        """Copy the row after the last into another; of its table the device knows nothing then."""
        old, request.row = len(self), row
        self.requests[row], self._ids[row] = request, request_id
        self._counts[:, row] = self._counts[:, old]
        self._sampling_words[row] = self._sampling_words[old]
        self.untold[request] = None

    def put_first(self, counts: Ints) -> Ints:
        """Let rows with a count come before all others, moving as few as can be; returns their counts."""
        chosen = counts > 0
        num = int(np.count_nonzero(chosen))
        others, late = (~chosen[:num]).nonzero()[0], num + chosen[num:].nonzero()[0]
        to, source = np.concatenate((others, late)), np.concatenate((late, others))
        self._counts[:, to] = self._counts[:, source]
        self._sampling_words[to] = self._sampling_words[source]
        moved = [self.requests[row] for row in source.tolist()]
        self.untold |= dict.fromkeys(moved)
        for row, request in zip(to.tolist(), moved, strict=True):
            self.requests[row], self._ids[row], request.row = request, request.request_id, row
        self._changed()
        first = counts[:num].copy()
        first[others] = counts[late]
        return first

    def launch(self, step: int, counts: Ints, num_sampled: Ints) -> None:
        """A step computes so many tokens of the first rows and samples so many: all but the first are drafts.

        Of a row that samples one token is certain, and drafts are as if they never were until the host has
        read which of them hold. So long, where its newest token stands is not known either.
        """
        num = len(counts)
        self.computed[:num] += counts
        self.last_step[:num] = step
        self._all_in_reach = num == len(self) and yields_one_each(num_sampled)
        if self._all_in_reach:
            self.total[:num] += 1
            self.place[:num] = self._numbers[:num]
        else:
            self.computed[:num] -= (num_sampled - 1).clip(0)
            self.total[:num] += num_sampled > 0
            self.place[: len(self)] = ON_HOST
            places, is_one = np.cumsum(num_sampled) - 1, num_sampled == 1
            self.place[:num][is_one] = places[is_one]

    def take_in(
        self, requests: Sequence[Request], serials: Ints, num_yielded: Ints, tokens: Ints
    ) -> list[int]:
        """The host has read a step's tokens, so many of each of these; returns who has left their rows."""
        num = len(requests)
        same = self.serial[:num] == serials
        away: list[int] = (~same).nonzero()[0].tolist()
        if not yields_one_each(num_yielded):
            samples, last = num_yielded > 0, np.cumsum(num_yielded) - 1
            same &= samples
            by_row = np.zeros(num, np.int64)
            by_row[samples] = tokens[last[samples]]
            tokens = by_row
            away = [place for place in away if samples[place]]
            self._hold(slice(num), np.where(same, num_yielded - 1, 0))
        self.known[:num] += same
        np.copyto(self.newest[:num], tokens, where=same)
        for place in away:
            row = requests[place].row
            if row >= 0:
                self._hold(row, num_yielded[place] - 1)
                self.known[row] += 1
                self.newest[row] = tokens[place]
        return away

    def _hold(self, rows: slice | int, num_drafts: Ints) -> None:
        """So many drafts of these rows were right: tokens that are known, and computed."""
        for column in (self.computed, self.total, self.known):
            column[rows] += num_drafts

    def check(self, in_flight: Mapping[Request, int]) -> None:
        """Every column says what the requests do; for tests."""
        assert [request.row for request in self.requests] == list(range(len(self)))
        assert [request.request_id for request in self.requests] == list(self.request_ids(len(self)))
        for row, request in enumerate(self.requests):
            known, flying = request.num_tokens, in_flight[request]
            assert (self.known[row], self.total[row]) == (known, known + flying), request
            assert self.computed[row] < known + flying < self.limit[row] == request.max_total_tokens, request
            assert self.newest[row] == request.token_ids(known - 1, known)[0], request
            assert self.blocks[row] <= self.most_blocks[row], request
            assert self.told[row] <= known + flying, request
            assert (self.slot[row] != NO_SLOT) == request.params.adjusts, request
            assert request.params.wants_reports == (row in self.reporters), request
            assert request in self.filling or self.computed[row] >= self.num_prompt[row], request
            assert self.sampling[row].item() == np.array(first_choice(request.params), SAMPLING).item()
        assert {*self.untold, *self.filling, *self._reporting, *self._early} <= {*self.requests}
        serials = self.serial[: len(self)].tolist()
        assert len({*serials, 0}) == len(self) + 1, "two rows have the same serial"
        assert not self.serial[len(self) :].any(), "a row without a request has a serial"
        used = self.slot[: len(self)][self.slot[: len(self)] != NO_SLOT].tolist()
        assert sorted(used + self._free_slots) == list(range(len(self.slot))), "a slot was lost or kept"

    def _changed(self) -> None:
        """Drop what is remembered of the rows as a whole."""
        self._request_ids: tuple[str, ...] | None = None
        self._all_sampling: NDArray[np.void] | None = None
        self._by_rank: Ints | None = None

    def _free_slot(self, row: int) -> None:
        if self.slot[row] != NO_SLOT:
            self._free_slots.append(int(self.slot[row]))
            self._free_slots.sort(reverse=True)  # slots far up make the device keep room for those below

    @property
    def slotted(self) -> Ints:
        """The rows whose logits are adjusted, in order."""
        if len(self._free_slots) == len(self.slot):
            return self._numbers[:0]
        slotted: Ints = (self.slot[: len(self)] != NO_SLOT).nonzero()[0]
        return slotted

    @property
    def need_tokens(self) -> bool:
        """Whether any is adjusted by code of the host's, which has to know every token before the next."""
        return any(self.requests[row].params.logits_processors for row in self.slotted.tolist())

    @property
    def reporters(self) -> list[int]:
        """The rows of which log-probabilities are wanted, in order."""
        return sorted([request.row for request in self._reporting])

    def request_ids(self, num: int) -> tuple[str, ...]:
        """Whose the first rows are; the same tuple while nothing changes."""
        if self._request_ids is None:
            self._request_ids = tuple(self._ids)
        return self._request_ids if num == len(self) else self._request_ids[:num]

    def sampling_of(self, num_sampled: Ints) -> NDArray[np.void]:
        """What so many samples of the first rows are drawn with; one array while each has one, unchanged."""
        if len(num_sampled) < len(self) or not yields_one_each(num_sampled):
            words = np.repeat(self._sampling_words[: len(num_sampled)], num_sampled, axis=0)
            return np.frombuffer(words.tobytes(), SAMPLING)
        if self._all_sampling is None:
            self._all_sampling = np.frombuffer(self._sampling_words[: len(self)].tobytes(), SAMPLING)
        return self._all_sampling

    @property
    def any_answers(self) -> bool:
        """Whether any has computed its whole prompt."""
        computed, num_prompt, filling = self.computed, self.num_prompt, self.filling
        return len(filling) < len(self) or any(computed[r.row] >= num_prompt[r.row] for r in filling)

    @property
    def by_rank(self) -> Ints:
        """All rows in order of their requests' ranks; the same array while nothing changes."""
        if self._by_rank is None:
            ranked = sorted(range(len(self)), key=lambda row: self.requests[row].rank)
            self._by_rank = np.array(ranked, np.int64)
        return self._by_rank

    def out_of_reach(self) -> Flags | None:
        """Rows whose newest token neither the host has read nor the last step sampled; None for none."""
        if self._all_in_reach:
            return None
        num = len(self)
        lost = (self.place[:num] == ON_HOST) & (self.total[:num] > self.known[:num])
        return lost if lost.any() else None

    def token_ids(self, counts: Ints) -> NDArray[np.int32]:
        """So many uncomputed tokens of each of the first rows, row after row; any for one on the device."""
        num = len(counts)
        newest = self.newest[:num].astype(np.int32)
        more = (self.total[:num] - self.computed[:num] > 1).nonzero()[0].tolist()
        if not more:
            return newest
        parts, end = [], 0
        for row in more:
            start = int(self.computed[row])
            contents = self.requests[row].token_bytes(start, start + int(counts[row]))
            parts += [newest[end:row], np.frombuffer(contents, np.int32)]
            end = row + 1
        return np.concatenate((*parts, newest[end:]))

    def banned(self, num_sampled: Ints) -> Banned:
        """Ids that the samples of the first rows must not be: those that stop, until min_tokens have come."""
        early = {}  # row: how many of its next tokens these are
        for request in [*self._early]:
            row = request.row
            left = int(self.num_prompt[row] + request.params.min_tokens - self.total[row])
            if left <= 0:
                del self._early[request]
            elif row < len(num_sampled) and num_sampled[row] and request.stop_token_ids:
                early[row] = min(left, int(num_sampled[row]))
        if not early:
            return ()
        firsts = np.cumsum(num_sampled) - num_sampled
        return tuple(
            (int(firsts[row]) + place, tuple(sorted(self.requests[row].stop_token_ids)))
            for row in sorted(early)
            for place in range(early[row])
        )

    def adjusted(self, num_sampled: Ints) -> Adjusted | None:
        """What is to be adjusted of the samples of the first rows, taken as told from now on."""
        rows = self.slotted
        if len(rows):
            rows = rows[: np.searchsorted(rows, len(num_sampled))]
            rows = rows[num_sampled[rows] > 0]
        if not len(rows):
            return None
        assert num_sampled[rows].max() == 1, "what is adjusted by the newest token has no drafts"
        requests = [self.requests[row] for row in rows.tolist()]
        total = self.total[rows]
        missed = []
        for row in rows[self.told[rows] < total - 1].tolist():
            told, known = int(self.told[row]), int(self.known[row])
            missed.append((int(self.slot[row]), told, self.requests[row].token_ids(told, known)))
        self.told[rows] = total
        return Adjusted(
            samples=(np.cumsum(num_sampled) - 1)[rows],
            params=tuple(request.plain_params for request in requests),
            num_prompt=self.num_prompt[rows],
            slots=self.slot[rows],
            missed=tuple(missed),
            longest=int(total.max()),
            histories=tuple(
                TokenHistory(
                    which=which,
                    request_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    output_token_ids=PrefixView(request.output_token_ids),
                )
                for which, request in enumerate(requests)
                if request.params.logits_processors
            ),
        )


def yields_one_each(num_tokens: Ints) -> bool:
    """Whether every one of these rows has one token; none of them has fewer than 0."""
    num = len(num_tokens)
    return bool(np.count_nonzero(num_tokens) == num == np.add.reduce(num_tokens))


def first_choice(params: SamplingParams) -> SamplingRow:
    """What a row is sampled with by the step itself: as cheaply as can be where it is chosen anew."""
    return (0.0, *sampling_row(params)[1:]) if params.adjusts else sampling_row(params)
