"""What each step computes. There is no prefill and no decode, only "computed so far" and "to compute now"."""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from ..common.errors import RequestError
from .in_flight import InFlight
from .kv_cache import KVCacheManager
from .request import FinishReason, Request, RequestStatus
from .rows import Rows
from .scheduler_config import SchedulerConfig
from .scheduler_output import ON_HOST, Ints, SchedulerOutput


class Scheduler:
    """First come, first served, and always in that order: running requests before waiting ones.

    Steps are planned from counts alone, so that the next can be launched before the tokens of the last are
    read: a request that has all its tokens on their way is "draining", and only an id or text that stops
    costs a token computed in vain, which is dropped.

    A request is admitted when all its known tokens fit the cache, so only new tokens can find it full. Then
    the youngest running request gives up its blocks, keeps its tokens, and waits to be computed again. The
    oldest is never preempted, so something always advances. Blocks that a step in flight may write are given
    back when it is over; who needs them waits, and everyone younger with it.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self.config = config
        self._kv_cache = kv_cache
        self._requests: dict[str, Request] = {}  # those waiting, running, or ended in flight
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # both in order of arrival,
        self._rows = Rows(config.max_num_seqs)  # every running one before every waiting one
        self._draining: dict[str, Request] = {}  # running still, as their last tokens are on their way
        self._leaving: list[Request] = []  # ended or preempted while a step may write their blocks
        self._in_flight = InFlight()
        self._preempted_ids: list[str] = []  # since the last plan
        self._num_arrivals = 0
        self.num_preemptions = 0
        self.num_finished = 0

    @property
    def has_work(self) -> bool:
        return bool(self._rows.requests or self._waiting or self._draining)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._rows) + len(self._draining)

    def num_computed_tokens(self, request: Request) -> int:
        """How many tokens of a request are in the cache, once every step in flight is over."""
        return int(self._rows.computed[request.row]) if request.row >= 0 else 0

    def add(self, request: Request) -> None:
        """Queue a request; it may grow as far as the context and the whole cache allow."""
        if request.request_id in self._requests:
            raise RequestError(f"request_id {request.request_id!r} is in use; wanted one that is not")
        capacity = self._kv_cache.capacity_tokens
        num_prompt = len(request.prompt_token_ids)
        limit = min(self.config.max_model_len - 1, capacity)
        assert 0 < num_prompt <= limit, f"{num_prompt} prompt tokens where 1 to {limit} fit"
        # The last token is only ever read, so it may come when the cache is full.
        request.max_total_tokens = min(request.max_total_tokens, self.config.max_model_len, capacity + 1)
        request.arrival = self._num_arrivals
        request.times.queued = time.monotonic()
        self._num_arrivals += 1
        self._requests[request.request_id] = self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands; False, and nothing done, if there is none of that name."""
        request = self._requests.get(request_id)
        if request is None or request.status is RequestStatus.FINISHED:
            return False
        self.finish(request_id, "abort")
        return True

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a live request and give back its blocks: now, or after the last step that may write them."""
        request = self._requests[request_id]
        if request.row >= 0:
            self._rows.remove([request.row])
        self._close(request, reason, stop_reason)

    def restate(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Give an ended request a better reason, found in the text of its last token."""
        assert request.status is RequestStatus.FINISHED, f"{request.request_id} is live"
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None where nothing can be done before a step in flight is over, or at all."""
        preemptions = self.num_preemptions
        counts = self._advance_running()
        if len(counts) == len(self._rows) and self.num_preemptions == preemptions:
            counts = self._admit_waiting(counts)
        if not len(counts):
            assert len(self._in_flight) or not self.has_work, "requests are live, but none can advance"
            return None
        return self._launch(counts)

    def update(self, plan: SchedulerOutput, sampled: Sequence[int] | NDArray[np.int32]) -> list[Request]:
        """Take in the tokens of the oldest step in flight, one a row that samples; returns who got one."""
        assert len(sampled) == plan.num_samples, f"{len(sampled)} tokens for {plan.num_samples} samples"
        samplers = self._in_flight.finish(plan)
        self._free_leaving()
        return self._take_in(samplers, np.asarray(sampled, np.int64))

    def discard(self, plan: SchedulerOutput) -> None:
        """Treat a step that failed, and all launched after it, as never begun.

        Their requests stand where they stood, to retry or abort; of the device nothing is taken for granted.
        """
        computed = {request: self.num_computed_tokens(request) for request in self._rows.requests}
        computed |= self._in_flight.undo(plan)
        running = sorted((*self._rows.requests, *self._draining.values()), key=_arrival)
        self._rows.clear()
        self._draining.clear()
        for request in running:
            self._restore(request, computed.get(request, 0))
        for request in (*self._leaving, *self._waiting.values()):
            request.last_step = self._in_flight.last_step(request)
        self._free_leaving()
        for request in reversed(running):
            if request.row < 0 and request.request_id not in self._draining:
                self._preempt(request)  # it had the row of one that was thought to be done

    def end_all(self) -> None:
        """Abort every request and open the books anew, whatever state an error left them in."""
        for request in self._requests.values():
            request.row = -1
            if request.status is not RequestStatus.FINISHED:
                request.status = RequestStatus.FINISHED
                request.finish_reason = "abort"
                request.times.finished = time.monotonic()
                self.num_finished += 1
        for book in (self._requests, self._waiting, self._draining, self._leaving, self._in_flight):
            book.clear()
        self._rows.clear()
        self._kv_cache.clear()

    def check(self) -> None:
        """Every invariant of the queues, the rows, the tables and the pool; for tests, between calls."""
        running, waiting = self._rows.requests, [*self._waiting.values()]
        draining, ended = [*self._draining.values()], [r for r in self._leaving if r.finish_reason]
        arrivals = [request.arrival for request in running + waiting]
        assert arrivals == sorted(arrivals), "someone overtook"
        assert all(request.status is RequestStatus.RUNNING for request in running + draining)
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), request
        for request in waiting + draining + ended:
            assert request.row == -1, request
        self._rows.check({request: self._in_flight.num_tokens(request) for request in running})
        for request in draining:
            total = request.num_tokens + self._in_flight.num_tokens(request)
            assert total == request.max_total_tokens, request
        for request in draining + self._leaving:
            assert not self._in_flight.is_over(request.last_step), request
        known = {request.request_id for request in (*running, *waiting, *draining, *ended)}
        assert self._requests.keys() == known, "a request was lost or kept"
        lengths = {r.request_id: self.num_computed_tokens(r) for r in (*running, *draining, *self._leaving)}
        self._kv_cache.check(lengths)

    def _advance_running(self) -> Ints:
        """Tokens to compute of each running request, up to the first that has to sit the step out."""
        rows = self._rows
        num = rows.num_in_reach()
        total = rows.total(num)
        wanted = self._at_most_a_chunk(total - rows.computed[:num])
        before = np.cumsum(wanted) - wanted
        budget = self._budget()
        counts: Ints = np.minimum(wanted, budget - before)[before < budget]
        short = np.flatnonzero(total[: len(counts)] > rows.blocks[: len(counts)] * self._kv_cache.block_size)
        if self._kv_cache.grow_each([rows.requests[row].request_id for row in short.tolist()]):
            rows.blocks[short] += 1
            return counts
        for row in short.tolist():
            if row < len(rows) and not self._make_room(row, int(total[row])):
                return counts[:row]
        return counts[: len(rows)]

    def _make_room(self, row: int, num_tokens: int) -> bool:
        """Blocks for all tokens of a row, from younger requests if need be; False if it must wait.

        It waits for blocks that are on their way back. The youngest keeps what it has and sits the step out:
        older ones may end before they need its blocks.
        """
        rows = self._rows
        request = rows.requests[row]
        while not self._kv_cache.grow(request.request_id, num_tokens):
            if self._leaving or self._draining or row == len(rows) - 1:
                return False
            self._preempt(rows.requests[-1])
        rows.blocks[row] = self._kv_cache.num_blocks(request.request_id)
        return True

    def _admit_waiting(self, counts: Ints) -> Ints:
        """Let waiting requests in, in order, while they fit and each running one has a block to grow into."""
        budget = self._budget() - int(counts.sum())
        more = []
        while self._waiting and budget > 0 and len(self._rows) < self.config.max_num_seqs:
            request = next(iter(self._waiting.values()))
            if not self._in_flight.is_over(request.last_step):  # its token is on its way
                break
            if not self._kv_cache.can_fit(request.num_tokens, spare_blocks=len(self._rows)):
                break
            more.append(min(request.num_tokens, budget, self.config.prefill_chunk or budget))
            budget -= more[-1]
            self._admit(request)
        return np.concatenate((counts, np.array(more, np.int64))) if more else counts

    def _admit(self, request: Request) -> None:
        self._kv_cache.grow(request.request_id, request.num_tokens)
        self._rows.append(request, blocks=self._kv_cache.num_blocks(request.request_id))
        del self._waiting[request.request_id]
        request.status = RequestStatus.RUNNING
        if request.times.first_scheduled is None:
            request.times.first_scheduled = time.monotonic()

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue, with its tokens, without its blocks."""
        if request.row >= 0:
            self._rows.remove([request.row])
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        self.num_preemptions += 1
        self._preempted_ids.append(request.request_id)
        self._give_back(request)

    def _launch(self, counts: Ints) -> SchedulerOutput:
        """The plan for so many tokens of each of the first rows, taken as launched from now on."""
        rows, num = self._rows, len(counts)
        samples = rows.computed[:num] + counts == rows.total(num)
        sources = np.where(rows.in_flight[:num] > 0, rows.place[:num], ON_HOST)
        requests = rows.requests[:num]
        plan = SchedulerOutput(
            step=self._in_flight.next_step,
            request_ids=rows.request_ids(num),
            counts=counts,
            num_computed=rows.computed[:num].copy(),
            token_ids=rows.token_ids(counts, sources),
            sources=sources,
            samples=samples,
            sampling=rows.sampling_of(samples),
            banned=rows.banned(samples),
            moved_from=rows.move_tables(),
            new_blocks=self._new_blocks(),
            preempted_ids=tuple(self._preempted_ids),
        )
        self._preempted_ids.clear()
        self._in_flight.launch(plan, requests)
        self._count_launched(plan)
        return plan

    def _count_launched(self, plan: SchedulerOutput) -> None:
        rows, num = self._rows, plan.num_rows
        rows.computed[:num] += plan.counts
        rows.in_flight[:num] += plan.samples
        rows.last_step[:num] = plan.step
        rows.place[: len(rows)] = ON_HOST
        rows.place[:num][plan.samples] = np.arange(plan.num_samples)
        drained = rows.total(num) >= rows.limit[:num]
        if drained.any():
            leaving = np.flatnonzero(drained)
            self._draining |= {plan.request_ids[row]: rows.requests[row] for row in leaving.tolist()}
            rows.remove(leaving)

    def _new_blocks(self) -> Ints:
        """Table entries that the device has not: rows, columns, block ids."""
        rows, num = self._rows, len(self._rows)
        found: list[tuple[int, int, int]] = []
        for row in np.flatnonzero(rows.blocks[:num] != rows.sent[:num]).tolist():
            sent = int(rows.sent[row])
            blocks = self._kv_cache.block_ids(rows.requests[row].request_id, sent)
            found += [(row, column, block) for column, block in enumerate(blocks, start=sent)]
        rows.sent[:num] = rows.blocks[:num]
        return np.array(found, np.int64).reshape(-1, 3).T

    def _take_in(self, samplers: list[Request], tokens: Ints) -> list[Request]:
        """Give each request that is live its token, and end it where that or the length says so."""
        places = np.array([request.row for request in samplers], np.int64)
        in_row = places >= 0
        rows, at = self._rows, places[in_row]
        rows.known[at] += 1
        rows.in_flight[at] -= 1
        rows.newest[at] = tokens[in_row]
        token_ids = tokens.tolist()
        if len(at) < len(samplers):  # some ended after the step was launched
            is_live = [request.finish_reason is None for request in samplers]
            samplers, token_ids = list(compress(samplers, is_live)), list(compress(token_ids, is_live))
        notable = {}
        for request, token in zip(samplers, token_ids, strict=True):
            request.output_token_ids.append(token)
            if token in request.stop_token_ids or request.row < 0:
                notable[request] = token
        for row in at[rows.known[at] == rows.num_prompt[at] + 1].tolist():
            notable[rows.requests[row]] = rows.requests[row].output_token_ids[-1]
        self._settle(notable)
        return samplers

    def _settle(self, notable: Mapping[Request, int]) -> None:
        """Of requests with a token that may be the last or was the first."""
        stopped = []
        for request, token in notable.items():
            if request.times.first_token is None:
                request.times.first_token = time.monotonic()
            may_stop = len(request.output_token_ids) > request.params.min_tokens
            if may_stop and token in request.stop_token_ids:
                stopped.append((request, token))
            elif request.num_tokens >= request.max_total_tokens:
                self._close(request, "length", None)
        running = [request.row for request, _ in stopped if request.row >= 0]
        if running:
            self._rows.remove(running)
        for request, token in stopped:
            named = token in (request.params.stop_token_ids or ())
            self._close(request, "stop", token if named else None)

    def _close(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End a request that has left its row."""
        self._waiting.pop(request.request_id, None)
        self._draining.pop(request.request_id, None)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.times.finished = time.monotonic()
        self.num_finished += 1
        if request not in self._leaving:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        """Free a request's blocks, now or when no step in flight may write them."""
        if not self._in_flight.is_over(request.last_step):
            self._leaving.append(request)
            return
        self._kv_cache.free(request.request_id)
        if request.status is RequestStatus.FINISHED:
            del self._requests[request.request_id]

    def _free_leaving(self) -> None:
        """A step is over: nothing writes any more into blocks that only it and earlier ones could write."""
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            self._give_back(request)

    def _restore(self, request: Request, computed: int) -> None:
        """Put a running request back as the steps that are still in flight leave it, if there is a row."""
        in_flight = self._in_flight.num_tokens(request)
        request.last_step = self._in_flight.last_step(request)
        if request.num_tokens + in_flight >= request.max_total_tokens:
            self._draining[request.request_id] = request
        elif len(self._rows) < self.config.max_num_seqs:
            blocks = self._kv_cache.num_blocks(request.request_id)
            self._rows.append(request, blocks=blocks, computed=computed, in_flight=in_flight)

    def _budget(self) -> int:
        """Tokens of the step in all; fewer where it keeps someone waiting for the next token of an answer."""
        rows, limit = self._rows, self.config.max_tokens_beside_decode
        most = self.config.max_num_batched_tokens
        if limit is None or not (rows.computed[: len(rows)] >= rows.num_prompt[: len(rows)]).any():
            return most
        return min(limit, most)

    def _at_most_a_chunk(self, wanted: Ints) -> Ints:
        chunk = self.config.prefill_chunk
        return wanted if chunk is None else np.minimum(wanted, chunk)


def _arrival(request: Request) -> int:
    return request.arrival
