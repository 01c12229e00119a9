"""Where each request stands: waiting, running, ended, or leaving while a step may still write its blocks."""

import time
from collections.abc import Callable, Set

from ...common.errors import RequestError, shown
from ..kv_cache.manager import KVCacheManager
from ..protocol.engine_output import FinishReason
from ..protocol.scheduler_output import SchedulerOutput
from .config import SchedulerConfig
from .faults import at_request
from .in_flight import InFlight
from .request import Request, RequestStatus
from .request_queue import Deadlines, WaitingQueue
from .running_batch import Rows

PRIORITY_SECONDS = 3600.0  # of waiting that one step of priority outweighs


class Lifecycle:
    """The books of live requests, and every way from one of them to another but those a step takes.

    A request that has all its tokens on their way is "draining". Blocks that a step in flight may write are
    given back when it is over, and only then, so a request that ended or was preempted may be "leaving".
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._kv_cache = kv_cache
        self._clock = clock
        self._requests: dict[str, Request] = {}  # those waiting, running, or ended in flight
        self._waiting = WaitingQueue()
        self._deadlines = Deadlines()
        self._rows = Rows(config.max_num_seqs)
        # Of those whose first step is not over: the step that lets each in, tokens looked for, tokens found.
        self._beginning: dict[Request, tuple[int, int, int]] = {}
        self._starting: dict[Request, None] = {}  # running, without a token that the host has read
        self._draining: dict[str, Request] = {}  # running still, as their last tokens are on their way
        self._leaving: list[Request] = []  # ended or preempted while a step may write their blocks
        self._in_flight = InFlight()
        # Who was let in last, and of how many tokens blocks can be found, written by which step. They are
        # entered when somebody looks for any or that step is over, so that the device need not wait for it.
        self._filled: tuple[Request, int, int] | None = None
        self._preempted_ids: list[str] = []  # since the last plan
        self.alone: Request | None = None  # if any, the only one to be let in
        self._num_arrivals = 0
        self.num_preemptions = 0
        self.num_finished = 0
        self.num_queried_tokens = 0  # of prompts, looked for in the cache
        self.num_hit_tokens = 0  # of them, found

    @property
    def has_work(self) -> bool:
        return bool(self._rows.requests or self._waiting or self._draining)

    @property
    def needs_tokens(self) -> bool:
        """Whether the next step cannot be planned before the host has read every token."""
        return self._rows.need_tokens

    @property
    def live_ids(self) -> Set[str]:
        """Every request that waits or runs, or has ended while a step may write its blocks."""
        return self._requests.keys()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._rows) + len(self._draining)

    def num_computed_tokens(self, request: Request) -> int:
        """How many tokens of a request are in the cache, once every step in flight is over."""
        return int(self._rows.computed[request.row]) if request.row >= 0 else request.num_computed

    def add(self, request: Request) -> None:
        """Queue a request; it may grow as far as the context and the whole cache allow."""
        if request.request_id in self._requests:
            raise RequestError(f"request_id {shown(request.request_id)} is in use; wanted one that is not")
        capacity = self._kv_cache.capacity_tokens
        num_prompt = len(request.prompt_token_ids)
        limit = min(self.config.max_model_len - 1, capacity)
        assert 0 < num_prompt <= limit, f"{num_prompt} prompt tokens where 1 to {limit} fit"
        # The last token is only ever read, so it may come when the cache is full.
        request.max_total_tokens = min(request.max_total_tokens, self.config.max_model_len, capacity + 1)
        now = self._clock()
        request.arrival = self._num_arrivals
        request.rank = now + request.priority * PRIORITY_SECONDS, request.arrival
        request.times.queued = now
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)
        self._deadlines.add(request)

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

    def expire(self) -> list[Request]:
        """End those whose deadline has passed, with the tokens they have; returns them."""
        if not len(self._deadlines):
            return []
        self._deadlines.forget_ended(len(self._requests))
        late = self._deadlines.passed(self._clock())
        for request in late:
            self.finish(request.request_id, "abort", "deadline")
        return late

    def restate(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Give an ended request a better reason, found in the text of its last token."""
        assert request.status is RequestStatus.FINISHED, f"{request.request_id} is live"
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def discard(self, plan: SchedulerOutput) -> None:
        """Treat a step that failed, and all launched after it, as never begun.

        Their requests stand where they stood, to retry or abort; of the device nothing is taken for granted.
        """
        computed = {request: self.num_computed_tokens(request) for request in self._rows.requests}
        computed |= self._in_flight.undo(plan)
        self._filled = None  # by the last step launched
        undone = [request for request, (step, *_) in self._beginning.items() if step >= plan.step]
        for request in undone:
            del self._beginning[request]
            request.num_cached_tokens = 0
        astray = {self._requests[name]: 0 for name in self._kv_cache.uncommit(plan.step)}
        computed |= astray  # they began with blocks that were never filled
        running = sorted((*self._rows.requests, *self._draining.values()), key=_rank)
        self._rows.clear()
        self._draining.clear()
        for request in (*running, *self._leaving, *self._waiting):
            request.last_step = self._in_flight.last_step(request)
            request.num_computed = computed.get(request, request.num_computed)
        for request in running:
            self._restore(request)
        self._free_leaving()
        fits = [r.row >= 0 or r.request_id in self._draining for r in running]  # not all get a row again
        lost = [place for place, request in enumerate(running) if request in astray or not fits[place]]
        for request in reversed(running[lost[0] :] if lost else ()):
            if request.request_id not in self._draining:
                self._preempt(request)

    def to_suspect(self) -> list[Request]:
        """Whom a step that failed may have been about: all that were ever let in, or else the first to be."""
        live = [request for request in self._requests.values() if request.finish_reason is None]
        return [r for r in live if r.times.first_scheduled is not None] or live[:1]

    def reopen(self, *, without: Request | None = None, launched: int = 0) -> None:
        """Open the books anew, whatever state an interrupt or an error left them in.

        Live requests wait, with the tokens they have, and are computed again; one that is left out has ended.
        This may be interrupted and repeated as well: until all is done, nothing is read but the requests.
        """
        known = [*self._requests.values()]
        for request in known:
            request.reset(self._clock())
        if without is not None and without.finish_reason is None:
            self._mark_ended(without, "abort", None)
        for request in known:
            if request.finish_reason is None and (end := end_by_token(request)) is not None:
                self._mark_ended(request, *end)
        live = sorted((request for request in known if request.finish_reason is None), key=_rank)
        queues = (
            self._waiting,
            self._deadlines,
            self._beginning,
            self._starting,
            self._draining,
            self._leaving,
        )
        for queue in queues:
            queue.clear()
        self._filled = None
        self._preempted_ids.clear()
        self._in_flight.clear(launched)
        self._rows.clear()
        self._kv_cache.clear()
        self._requests = {request.request_id: request for request in live}
        for request in live:
            self._waiting.append(request)
            self._deadlines.add(request)

    def check(self) -> None:
        """Every invariant of the queues, the rows, the tables and the pool; for tests, between calls."""
        running, waiting = self._rows.requests, [*self._waiting]
        draining, ended = [*self._draining.values()], [r for r in self._leaving if r.finish_reason]
        self._waiting.check()
        assert all(request.status is RequestStatus.RUNNING for request in running + draining)
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), request
        for request in waiting + draining + ended:
            assert request.row == -1, request
        self._rows.check({request: self._in_flight.num_tokens(request) for request in running})
        for request in draining:
            total = request.num_tokens + self._in_flight.num_tokens(request)
            assert total == request.max_total_tokens, request
        assert {r for r in running + draining if not r.output_token_ids} <= self._starting.keys()
        assert not any(request.output_token_ids or request.finish_reason for request in self._starting)
        for request in draining + self._leaving:
            assert not self._in_flight.is_over(request.last_step), request
        known = {request.request_id for request in (*running, *waiting, *draining, *ended)}
        assert self._requests.keys() == known, "a request was lost or kept"
        lengths = {r.request_id: self.num_computed_tokens(r) for r in (*running, *draining, *self._leaving)}
        self._kv_cache.check(lengths, {request.request_id for request in waiting})

    @at_request
    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue, with its tokens, without its blocks."""
        if request.row >= 0:
            self._rows.remove([request.row])
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self._waiting.append(request)
        self.num_preemptions += 1
        self._preempted_ids.append(request.request_id)
        self._give_back(request)

    @at_request
    def _close(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End a request that has left its row."""
        self._waiting.discard(request)
        self._draining.pop(request.request_id, None)
        self._starting.pop(request, None)
        self._mark_ended(request, reason, stop_reason)
        if request not in self._leaving:
            self._give_back(request)

    def _mark_ended(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        request.stop_reason = stop_reason
        request.times.finished = self._clock()
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.num_finished += request.is_counted

    @at_request
    def _give_back(self, request: Request) -> None:
        """Free a request's blocks, now or when no step in flight may write them; what they hold is kept."""
        if not self._in_flight.is_over(request.last_step):
            self._leaving.append(request)
            return
        self._kv_cache.commit(request, min(request.num_computed, request.num_tokens), request.last_step)
        request.num_computed = 0
        if request.status is RequestStatus.FINISHED:
            self._kv_cache.free(request.request_id)
            del self._requests[request.request_id]
        else:
            self._kv_cache.suspend(request.request_id)

    def _enter_filled(self) -> None:
        """Let others find what the request let in last fills."""
        filled, self._filled = self._filled, None
        if filled is not None:
            self._commit(*filled)

    @at_request
    def _commit(self, request: Request, num_tokens: int, step: int) -> None:
        self._kv_cache.commit(request, num_tokens, step)

    def _free_leaving(self) -> None:
        """A step is over: nothing writes any more into blocks that only it and earlier ones could write."""
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            self._give_back(request)

    def _restore(self, request: Request) -> None:
        """Put a running request back as the steps that are still in flight leave it, if there is a row."""
        in_flight = self._in_flight.num_tokens(request)
        if request.num_tokens + in_flight >= request.max_total_tokens:
            self._draining[request.request_id] = request
        elif len(self._rows) < self.config.max_num_seqs:
            self._give_row(request, computed=request.num_computed, in_flight=in_flight)

    @at_request
    def _give_row(self, request: Request, *, computed: int, in_flight: int = 0) -> None:
        """A row for a request that has a table; the last token that it may come to have needs no room."""
        blocks = self._kv_cache.num_blocks(request.request_id)
        most = self._kv_cache.blocks_for(request.max_total_tokens - 1)
        self._rows.append(request, blocks=blocks, most_blocks=most, computed=computed, in_flight=in_flight)


def _rank(request: Request) -> tuple[float, int]:
    return request.rank


def end_by_token(request: Request) -> tuple[FinishReason, int | str | None] | None:
    """How a live request's newest token ends it, if it does."""
    tokens = request.output_token_ids
    if len(tokens) > request.params.min_tokens and tokens[-1] in request.stop_token_ids:
        return "stop", tokens[-1] if tokens[-1] in (request.params.stop_token_ids or ()) else None
    if tokens and request.num_tokens >= request.max_total_tokens:
        return "length", None
    return None
