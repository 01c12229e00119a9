"""What each step computes. There is no prefill and no decode, only "computed so far" and "to compute now"."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..common.errors import ConfigError, RequestError
from .kv_cache import KVCacheManager
from .request import FinishReason, Request, RequestStatus, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step: requests, tokens in all, tokens of one request (prefill_chunk, None for no limit)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; wanted at least 1")
        if self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; wanted at least 2: a prompt and a new token"
            )


class ScheduledRequest(NamedTuple):
    """One request's part of a step: the tokens to compute, how many are computed, and their blocks."""

    request_id: str
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    samples: bool  # these are the last known tokens, so the step yields the next one
    params: SamplingParams
    banned_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutput:
    """One step, as plain data that another process could receive."""

    step: int
    requests: tuple[ScheduledRequest, ...]
    num_tokens: int
    preempted_ids: tuple[str, ...] = ()


@dataclass(slots=True)
class _Step:
    """A step being planned."""

    budget: int
    requests: list[ScheduledRequest] = field(default_factory=list)
    preempted_ids: list[str] = field(default_factory=list)


class Scheduler:
    """First come, first served, and always in that order: running requests before waiting ones.

    A request is admitted when all its known tokens fit the cache, so only new tokens can find it full. Then
    the youngest running request gives up its blocks, keeps its tokens, and waits to be computed again. The
    oldest is never preempted, so something always advances. A running request always finds some budget left,
    as the older ones never take more of it than they did when it was admitted.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self.config = config
        self._kv_cache = kv_cache
        self._requests: dict[str, Request] = {}  # those waiting, running, or ended in flight
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # both in order of arrival,
        self._running: dict[str, Request] = {}  # every running one before every waiting one
        self._in_flight: SchedulerOutput | None = None
        self._ended_in_flight: list[Request] = []
        self._num_steps = 0
        self._num_arrivals = 0
        self.num_preemptions = 0
        self.num_finished = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

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
        known = request_id in self._running or request_id in self._waiting
        if known:
            self.finish(request_id, "abort")
        return known

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a live request and give back its blocks: now, or after the step that may still write them."""
        request = self._requests[request_id]
        runs = request.status is RequestStatus.RUNNING
        del (self._running if runs else self._waiting)[request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.times.finished = time.monotonic()
        self.num_finished += 1
        if runs and self._in_flight is not None:
            self._ended_in_flight.append(request)
        else:
            self._release(request)

    def restate(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Give an ended request a better reason, found in the text of its last token."""
        assert request.status is RequestStatus.FINISHED, f"{request.request_id} is live"
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None where there is nothing to do; update or discard the one before it first."""
        assert self._in_flight is None, "a step is in flight"
        if not self.has_work:
            return None
        step = _Step(budget=self.config.max_num_batched_tokens)
        if self._advance_running(step):
            self._admit_waiting(step)
        assert step.requests, "requests are live, but none can advance"
        self._num_steps += 1
        self._in_flight = SchedulerOutput(
            step=self._num_steps,
            requests=tuple(step.requests),
            num_tokens=self.config.max_num_batched_tokens - step.budget,
            preempted_ids=tuple(step.preempted_ids),
        )
        return self._in_flight

    def update(self, plan: SchedulerOutput, sampled: Sequence[int]) -> list[Request]:
        """Take in a step's tokens, one a request that samples, in order; returns who got one."""
        expected = sum(scheduled.samples for scheduled in plan.requests)
        assert len(sampled) == expected, f"{len(sampled)} tokens for {expected} requests that sample"
        self._land(plan)
        tokens = iter(sampled)
        received = []
        for scheduled in plan.requests:
            token_id = next(tokens) if scheduled.samples else None
            request = self._requests.get(scheduled.request_id)
            if request is None:  # aborted while the step ran
                continue
            request.num_computed_tokens += len(scheduled.token_ids)
            if token_id is not None:
                self._append(request, token_id)
                received.append(request)
        return received

    def discard(self, plan: SchedulerOutput) -> None:
        """Treat a step that failed as never begun: its requests stand where they stood, to retry or abort."""
        self._land(plan)

    def end_all(self) -> None:
        """Abort every request and open the books anew, whatever state an error left them in."""
        for request in self._requests.values():
            if request.status is not RequestStatus.FINISHED:
                request.status = RequestStatus.FINISHED
                request.finish_reason = "abort"
                request.times.finished = time.monotonic()
                self.num_finished += 1
        for book in (self._requests, self._waiting, self._running, self._ended_in_flight):
            book.clear()
        self._in_flight = None
        self._kv_cache.clear()

    def check(self) -> None:
        """Every invariant of the queues, the tables and the pool; for tests, between steps."""
        running, waiting, ended = [*self._running.values()], [*self._waiting.values()], self._ended_in_flight
        arrivals = [request.arrival for request in (*running, *waiting)]
        assert arrivals == sorted(arrivals), "someone overtook"
        for request in running:
            assert request.status is RequestStatus.RUNNING, request
            assert request.num_computed_tokens < request.num_tokens < request.max_total_tokens, request
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), request
            assert request.num_computed_tokens == 0, request
        known = {request.request_id for request in (*running, *waiting, *ended)}
        assert self._requests.keys() == known, "a request was lost or kept"
        self._kv_cache.check({r.request_id: r.num_computed_tokens for r in (*running, *ended)})

    def _advance_running(self, step: _Step) -> bool:
        """Plan the running requests; False where the cache is too full for all, let alone for more."""
        for request in tuple(self._running.values()):
            if request.status is not RequestStatus.RUNNING:
                return False  # it was preempted for an older one, as was every request after it
            if not self._make_room(request, step):
                return False
            self._plan(request, step)
        return True

    def _admit_waiting(self, step: _Step) -> None:
        """Let waiting requests in, in order, while they fit and each running one has a block to grow into."""
        while self._waiting and step.budget > 0 and self.num_running < self.config.max_num_seqs:
            request = next(iter(self._waiting.values()))
            if not self._kv_cache.can_fit(request.num_tokens, spare_blocks=self.num_running):
                return
            self._kv_cache.grow(request.request_id, request.num_tokens)
            self._running[request.request_id] = self._waiting.pop(request.request_id)
            request.status = RequestStatus.RUNNING
            if request.times.first_scheduled is None:
                request.times.first_scheduled = time.monotonic()
            self._plan(request, step)

    def _plan(self, request: Request, step: _Step) -> None:
        """Add to the step as many of a request's uncomputed tokens as may go into it."""
        start, end = request.num_computed_tokens, request.num_tokens
        count = min(end - start, step.budget, self.config.prefill_chunk or step.budget)
        assert count > 0, f"{request.request_id} was admitted but cannot advance"
        samples = start + count == end
        token_ids = request.token_ids(start, start + count)
        block_ids = self._kv_cache.block_ids(request.request_id)
        banned = request.banned_token_ids if samples else ()
        step.budget -= count
        step.requests.append(
            ScheduledRequest(request.request_id, token_ids, start, block_ids, samples, request.params, banned)
        )

    def _make_room(self, request: Request, step: _Step) -> bool:
        """Blocks for all the request's tokens, from younger requests if need be; False if it is the youngest.

        The youngest keeps what it has and sits the step out: older ones may end before they need its blocks.
        """
        while not self._kv_cache.grow(request.request_id, request.num_tokens):
            youngest = next(reversed(self._running.values()))
            if youngest is request:
                return False
            self._preempt(youngest)
            step.preempted_ids.append(youngest.request_id)
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue, with its tokens, without its blocks."""
        del self._running[request.request_id]
        self._kv_cache.free(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        self.num_preemptions += 1

    def _append(self, request: Request, token_id: int) -> None:
        """Give a request its next token, and end it where that token or the length says so."""
        request.output_token_ids.append(token_id)
        if request.times.first_token is None:
            request.times.first_token = time.monotonic()
        may_stop = len(request.output_token_ids) > request.params.min_tokens
        if may_stop and token_id in request.stop_token_ids:
            named = token_id in (request.params.stop_token_ids or ())
            self.finish(request.request_id, "stop", token_id if named else None)
        elif request.num_tokens >= request.max_total_tokens:
            self.finish(request.request_id, "length")

    def _land(self, plan: SchedulerOutput) -> None:
        """The step is over: nothing writes any more into the blocks of requests that ended meanwhile."""
        assert plan is self._in_flight, "not the step in flight"
        self._in_flight = None
        for request in self._ended_in_flight:
            self._release(request)
        self._ended_in_flight.clear()

    def _release(self, request: Request) -> None:
        self._kv_cache.free(request.request_id)
        del self._requests[request.request_id]
