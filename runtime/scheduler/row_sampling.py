"""What the tokens of running requests are drawn with: parameters, excluded ids, adjustments of logits."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol.scheduler_output import (
    SAMPLING,
    Adjusted,
    Banned,
    Constrained,
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
NO_ROWS = np.zeros(0, np.int64)


class _AdjustedPart(NamedTuple):
    """What stays of Adjusted while the same rows have as many samples each."""

    rows: Ints  # that have any
    counts: Ints  # samples of each
    samples: Ints
    params: tuple[SamplingParams, ...]
    num_prompt: Ints
    slots: Ints
    processed: list[tuple[int, Request]]  # with logits processors: the first sample of each, and whose it is
    bound: Flags  # which of the rows have a grammar
    constrained: list[tuple[Any, ...]]  # of them the first samples, rows, request ids, and who may jump


class RowSampling:
    """Sampling of the rows of a running batch, whose calls say who enters a row, who leaves, and who moves.

    What most requests do not have (adjusted logits, log-probabilities, min_tokens) is kept by those that have
    it, so that a step without costs nothing.
    """

    def __init__(self, requests: Sequence[Request], columns: Mapping[str, Ints]) -> None:
        """All of the batch, to be read: who has each row, and columns of counts by name [max_num_rows]."""
        num_rows = len(columns["total"])
        self._requests = requests
        self._total, self._known = columns["total"], columns["known"]
        self._num_prompt, self._unjudged = columns["num_prompt"], columns["unjudged"]
        self._parameters = np.zeros(num_rows, SAMPLING)
        # The same memory in words: numpy copies structured arrays field by field.
        self._words = self._parameters.view(np.int64).reshape(num_rows, -1)
        self._slots = np.zeros(num_rows, np.int64)  # where the device keeps the row's tokens, or NO_SLOT
        self._processed = np.zeros(num_rows, bool)  # by code that has to be given them before the next
        self._num_sent = np.zeros(num_rows, np.int64)  # of them, how many it has
        self.clear()

    def clear(self) -> None:
        """No row has a request."""
        self._reporting: dict[Request, None] = {}  # log-probabilities are wanted of them
        self._pooling: dict[Request, None] = {}  # a result of their prompts is wanted in place of tokens
        self._early: dict[Request, None] = {}  # they may not have min_tokens so far
        self._free_slots = list(range(len(self._slots)))[::-1]  # the lowest last
        self._change()

    def _change(self) -> None:
        """Who has which row is no more what it was."""
        self._all: NDArray[np.void] | None = None
        self._adjusted_part: _AdjustedPart | None = None

    def enter(self, row: int, request: Request) -> None:
        """A request has that row now, which nobody had."""
        params = request.params
        self._parameters[row] = _first_choice(request)
        self._slots[row] = self._free_slots.pop() if request.adjusts else NO_SLOT
        self._processed[row] = bool(params.logits_processors)
        self._num_sent[row] = 0
        if params.wants_logprobs:
            self._reporting[request] = None
        if request.pooling is not None:
            self._pooling[request] = None
        if params.min_tokens:
            self._early[request] = None
        self._change()

    def leave(self, row: int, request: Request) -> None:
        """A request gives up its row."""
        slot = int(self._slots[row])
        if slot != NO_SLOT:
            self._free_slots.append(slot)
            self._free_slots.sort(reverse=True)  # slots far up make the device keep room for those below
        self._reporting.pop(request, None)
        self._pooling.pop(request, None)
        self._early.pop(request, None)
        self._change()

    def move(self, to: int | Ints, source: int | Ints) -> None:
        """Whoever had these rows has those now."""
        for column in (self._words, self._slots, self._processed, self._num_sent):
            column[to] = column[source]
        self._change()

    @property
    def need_tokens(self) -> bool:
        """Whether any is adjusted by code of the host's, which has to know every token before the next."""
        return any(self._requests[row].params.logits_processors for row in self._slotted.tolist())

    @property
    def reporters(self) -> list[int]:
        """The rows of which log-probabilities are wanted, in order."""
        return sorted([request.row for request in self._reporting]) if self._reporting else []

    @property
    def poolers(self) -> list[int]:
        """The rows whose hidden states are pooled, in order."""
        return sorted([request.row for request in self._pooling]) if self._pooling else []

    def need_exact_counts(self, num: int) -> Flags:
        """Which of the first rows are sampled by what the host knows only once drafts are judged."""
        exact = self._processed[:num].copy()
        exact[[r.row for r in self._early if r.row < num and r.stop_token_ids]] = True
        return exact

    def parameters(self, num_sampled: Ints, *, is_one_each: bool = False) -> NDArray[np.void]:
        """What so many samples of the first rows are drawn with, [samples] of SAMPLING.

        is_one_each: whether each has one, as is known; then one array serves while nobody comes or goes.
        """
        num = len(num_sampled)
        if num < len(self._requests) or not is_one_each:
            words = np.repeat(self._words[:num], num_sampled, axis=0)
            return np.frombuffer(words.tobytes(), SAMPLING)
        if self._all is None:
            self._all = np.frombuffer(self._words[:num].tobytes(), SAMPLING)
        return self._all

    def banned(self, num_sampled: Ints) -> Banned:
        """Ids that samples of the first rows must not be: those that stop, until min_tokens have come."""
        early = {}  # row: how many of its next tokens these are
        for request in [*self._early]:
            row = request.row
            left = int(self._num_prompt[row] + request.params.min_tokens - self._total[row])
            if left <= 0:
                del self._early[request]
            elif row < len(num_sampled) and num_sampled[row] and request.stop_token_ids:
                early[row] = min(left, int(num_sampled[row]))
        if not early:
            return ()
        firsts = np.cumsum(num_sampled) - num_sampled
        return tuple(
            (int(firsts[row]) + place, tuple(sorted(self._requests[row].stop_token_ids)))
            for row in sorted(early)
            for place in range(early[row])
        )

    def adjusted(self, num_sampled: Ints, *, is_one_each: bool = False) -> Adjusted | None:
        """What is to be adjusted of the samples of the first rows, taken as sent from now on.

        is_one_each: as for parameters(); then only what a step changes is found out anew.
        """
        is_all = is_one_each and len(num_sampled) == len(self._requests)
        part = self._adjusted_part if is_all else None
        if part is None:
            part = self._adjusted_of(num_sampled)
            self._adjusted_part = part if is_all else None
        rows = part.rows
        if not len(rows):
            return None
        outputs = (self._total - self._num_prompt)[rows[part.bound]].tolist()
        return Adjusted(
            samples=part.samples,
            params=part.params,
            num_prompt=part.num_prompt,
            slots=part.slots,
            missed=self._send(rows),
            longest=int((self._total[rows] + self._unjudged[rows] + part.counts).max()) - 1,
            histories=tuple(_history(start, request) for start, request in part.processed),
            constrained=tuple(map(Constrained, *part.constrained[:3], outputs, part.constrained[3])),
        )

    def _adjusted_of(self, num_sampled: Ints) -> _AdjustedPart:
        rows = self._slotted
        rows = rows[: np.searchsorted(rows, len(num_sampled))]
        rows = rows[num_sampled[rows] > 0]
        requests = [self._requests[row] for row in rows.tolist()]
        counts = np.where(self._processed[rows], 1, num_sampled[rows])  # what follows one are fillers
        starts, which = np.cumsum(counts) - counts, np.repeat(np.arange(len(rows)), counts)
        firsts = (np.cumsum(num_sampled) - num_sampled)[rows] - starts
        placed = [*zip(starts.tolist(), requests, strict=True)]
        bound = [(start, r.row, r.request_id, r.may_jump) for start, r in placed if r.grammar is not None]
        return _AdjustedPart(
            rows=rows,
            counts=counts,
            samples=firsts[which] + np.arange(len(which)),
            params=tuple(requests[number].plain_params for number in which.tolist()),
            num_prompt=self._num_prompt[rows[which]],
            slots=self._slots[rows[which]],
            processed=[(start, r) for start, r in placed if r.params.logits_processors],
            bound=np.array([r.grammar is not None for r in requests], bool),
            constrained=[*zip(*bound, strict=True)] if bound else [(), (), (), ()],
        )

    def hold(self, rows: slice | int, num_drafts: Ints) -> None:
        """So many drafts of these rows were right, which the device has among its tokens."""
        self._num_sent[rows] += num_drafts

    def check(self) -> None:
        """Every row is sampled as its request wants; slots are free or used, one of them; for tests."""
        for row, request in enumerate(self._requests):
            assert self._num_sent[row] <= self._total[row], request
            assert (self._slots[row] != NO_SLOT) == request.adjusts, request
            assert request.params.wants_logprobs == (row in self.reporters), request
            assert (request.pooling is not None) == (row in self.poolers), request
            wanted = np.array(_first_choice(request), SAMPLING)
            assert self._parameters[row].item() == wanted.item(), request
        assert {*self._reporting, *self._pooling, *self._early} <= {*self._requests}
        used = self._slots[self._slotted].tolist()
        assert sorted(used + self._free_slots) == list(range(len(self._slots))), "a slot was lost or kept"

    @property
    def _slotted(self) -> Ints:
        """The rows whose logits are adjusted, in order."""
        if len(self._free_slots) == len(self._slots):
            return NO_ROWS
        slotted: Ints = (self._slots[: len(self._requests)] != NO_SLOT).nonzero()[0]
        return slotted

    def _send(self, rows: Ints) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """What the device lacks of these rows' tokens but for the newest: slots, first positions, tokens."""
        total = self._total[rows]
        missed = []
        for row in rows[self._num_sent[rows] < total - 1].tolist():
            first, known = int(self._num_sent[row]), int(self._known[row])
            missed.append((int(self._slots[row]), first, self._requests[row].token_ids(first, known)))
        self._num_sent[rows] = total
        return tuple(missed)


def _history(which: int, request: Request) -> TokenHistory:
    """The tokens of an adjusted sample's request, without a copy."""
    return TokenHistory(
        which=which,
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=PrefixView(request.output_token_ids),
    )


def _first_choice(request: Request) -> SamplingRow:
    """What a row is sampled with by the step itself: as cheaply as can be where it is chosen anew."""
    own = sampling_row(request.params)
    return (0.0, *own[1:]) if request.adjusts else own
