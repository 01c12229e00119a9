"""What each step computes. There is no prefill and no decode, only "computed so far" and "to compute now"."""

import itertools
import time
from collections.abc import Callable, Mapping, Set
from typing import TypeVar

import numpy as np

from ...common.errors import RequestError, shown
from ..kv_cache.manager import KVCacheManager
from ..protocol.engine_output import FinishReason
from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import Ints, SchedulerOutput
from ..speculation.config import spare_columns
from .adapter_slots import AdapterSlots
from .admission import Admission
from .beginnings import Beginnings
from .config import SchedulerConfig
from .drafting import Drafting
from .faults import at_request
from .in_flight import InFlight, Launched
from .listener import Listener
from .live_requests import LiveRequests
from .logprob_requests import take_in_logprobs
from .planner import Planner
from .pooling_requests import take_in_pooled
from .request import Request, RequestStatus, append_each
from .request_queue import RequestQueue
from .running_batch import RunningBatch

News = TypeVar("News")  # a token, or several
MIXED_STEP_COST = 1.0  # of a decode step, that it takes longer where a row has several tokens


class Scheduler:
    """By rank, and always in that order: first come, first served, where all have the same priority.

    Steps are planned from counts alone, so that the next can be launched before the tokens of the last are
    read: a request that has all its tokens in flight is "draining", and only an id or text that stops
    costs a token computed in vain, which is dropped.

    A request is admitted when all its known tokens fit the cache and those before it can grow, so only new
    tokens can find it full. Then the running request that ranks last gives up its blocks, keeps its tokens,
    and waits to be computed again, for twice the room to grow each time. The first is never preempted, so
    something always advances. Blocks that a step in flight may write are pending free until it is over; who
    needs them waits, and everyone after it. Blocks that a step in flight fills can be shared at once: what
    reads them runs after it, or, in the same step, after all keys and values of a layer are written.

    Each part writes its own state: who waits (RequestQueue), who runs and how far each has come
    (RunningBatch), block tables (KVCacheManager), steps that the host has not read (InFlight), who is live
    and how they leave (LiveRequests). A listener hears of every event and decision.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        listener: Listener | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.alone: Request | None = None  # if any, the only one to be admitted
        self._kv_cache, self._listener, self._clock = kv_cache, listener, clock
        self._queue, self._in_flight = RequestQueue(), InFlight()
        spare = spare_columns(config.max_drafts, kv_cache.block_size)
        self._batch = RunningBatch(config.max_num_seqs, spare, config.num_batches > 1)
        self.drafting = Drafting(config, self._batch)
        self.num_forced_tokens = 0  # that came without a sample, as a grammar left no other
        self._beginnings = Beginnings(clock)
        self._live = LiveRequests(
            queue=self._queue,
            batch=self._batch,
            kv_cache=kv_cache,
            in_flight=self._in_flight,
            beginnings=self._beginnings,
            listener=listener,
            clock=clock,
        )
        self._adapters = AdapterSlots(config.max_loras)
        self._admission = Admission(
            config,
            adapters=self._adapters,
            queue=self._queue,
            batch=self._batch,
            kv_cache=kv_cache,
            in_flight=self._in_flight,
            beginnings=self._beginnings,
        )
        self._planner = Planner(
            config,
            adapters=self._adapters,
            batch=self._batch,
            kv_cache=kv_cache,
            in_flight=self._in_flight,
            live=self._live,
            admission=self._admission,
            drafting=self.drafting,
        )
        if listener is not None:
            listener.on_start(config, kv_cache)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._batch or len(self._queue))

    @property
    def needs_tokens(self) -> bool:
        """Whether the next step cannot be planned before the host has read every token."""
        return self._batch.sampling.need_tokens

    @property
    def live_ids(self) -> Set[str]:
        """Every request that waits or runs, or has ended while a step may write its blocks."""
        return self._live.ids

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return self._batch.num_running

    @property
    def num_preemptions(self) -> int:
        return self._live.num_preemptions

    @property
    def num_finished(self) -> int:
        return self._live.num_finished

    @property
    def num_queried_tokens(self) -> int:
        """Tokens of prompts that were looked for in the prefix cache."""
        return self._beginnings.num_queried_tokens

    @property
    def num_hit_tokens(self) -> int:
        """Of them, how many were there."""
        return self._beginnings.num_hit_tokens

    def num_computed_tokens(self, request: Request) -> int:
        """How many tokens of a request are in the cache, once every step in flight is over."""
        return self._batch.num_computed(request)

    def add(self, request: Request) -> None:
        """Queue a request; it may grow as far as the context and the whole cache allow.

        Raises RequestError for the id of one that is live.
        """
        if request.request_id in self._live:
            raise RequestError(f"request_id {shown(request.request_id)} is in use; wanted one that is not")
        capacity = self._kv_cache.capacity_tokens
        num_prompt = len(request.prompt_token_ids)
        # The last token is only ever read, so it may come when the cache is full, and a result is no token.
        most = self.config.max_model_len + (request.pooling is not None)
        limit = min(most - 1, capacity)
        assert 0 < num_prompt <= limit, f"{num_prompt} prompt tokens where 1 to {limit} fit"
        request.clamp(min(most, capacity + 1))
        self._live.add(request)
        if self._listener is not None:
            self._listener.on_add(request)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands; False, and nothing done, if there is none of that name."""
        request = self._live.get(request_id)
        if request is None or request.status is RequestStatus.FINISHED:
            return False
        self.finish(request_id, "abort")
        return True

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a live request and give back its blocks: now, or after the last step that may write them."""
        request = self._live[request_id]
        self._live.end(request, reason, stop_reason)
        if self._listener is not None:
            self._listener.on_finish(request)

    def expire(self) -> list[Request]:
        """End those whose deadline has passed, with the tokens they have; returns them."""
        late = self._queue.expired(self._clock, len(self._live))
        for request in late:
            self.finish(request.request_id, "abort", "deadline")
        return late

    def count_finished(self) -> None:
        """Count one more finished request: one that was served by others, which are not counted."""
        self._live.count_finished()

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None where nothing can be done before a step in flight is over, or at all."""
        self._admission.commit()
        counts = self._planner.counts(self.alone)
        plan = self._launch(counts) if len(counts) else None
        assert plan or len(self._in_flight) or not self.has_work, "requests are live, but none can advance"
        if self._listener is not None:
            self._listener.on_schedule(plan)
        return plan

    def update(self, plan: SchedulerOutput, output: RunnerOutput) -> list[Request]:
        """Take in the tokens of the oldest step in flight; returns the live requests that got any, by row.

        Tokens after one that ends its request are dropped. `output` says ids, counts and log-probabilities,
        and which tokens are forced to follow: those are known from now on, and computed as a prompt's are.
        """
        num_yielded = _checked_counts(plan, output)
        self._admission.commit()
        launched = self._in_flight.finish(plan)
        self._beginnings.step_over(plan.step)
        if plan.wanted_logprobs is not None:
            rows = [self._live.get(request_id) for request_id in plan.request_ids]
            take_in_logprobs(plan.wanted_logprobs, output.logprobs, launched.owners(num_yielded), rows)
        if plan.pooling is not None:
            take_in_pooled(plan, output.pooled, self._live)
        self._live.free_pending()
        self.drafting.learn(launched, num_yielded, output)
        received, notable = self._take_in(launched, num_yielded, np.asarray(output.token_ids, np.int64))
        num_forced = self._force(received, output.forced) if output.forced else {}
        self._beginnings.note_first_tokens()
        self._live.end_by_tokens(notable | dict.fromkeys(num_forced))
        if self._kv_cache.has_windows:
            self._release_unseen(launched, num_yielded)
        if self._listener is not None:
            self._listener.on_update(plan, output, received, num_forced)
        return received

    def discard(self, plan: SchedulerOutput) -> None:
        """Treat a step that failed, and all launched after it, as never begun.

        Their requests stand where they stood, to retry or abort; of the device nothing is taken for granted.
        """
        batch, live = self._batch, self._live
        computed = {request: batch.num_computed(request) for request in batch.requests}
        computed |= self._in_flight.undo(plan)
        self._admission.clear()
        self._adapters.clear()
        self._beginnings.undo(plan.step)
        astray = {live[name]: 0 for name in self._kv_cache.uncommit(plan.step)}
        computed |= astray  # they began with blocks that were never filled
        running = sorted((*batch.requests, *batch.draining), key=lambda request: request.rank)
        batch.clear()
        for request in (*running, *live.pending_free, *self._queue):
            last_step = self._in_flight.last_step(request)
            request.leave_row(last_step, computed.get(request, request.num_computed))
        fits = [self._restore(request) for request in running]  # not all get a row again
        live.free_pending()
        lost = [place for place, request in enumerate(running) if request in astray or not fits[place]]
        for request in reversed(running[lost[0] :] if lost else ()):
            if request not in batch.draining:
                live.preempt(request)
        if self._listener is not None:
            self._listener.on_discard(plan)

    def to_suspect(self) -> list[Request]:
        """Whom a failed step may have been about: all that were ever admitted, or else the first to be."""
        live = [request for request in self._live if request.finish_reason is None]
        return [r for r in live if r.times.first_scheduled is not None] or live[:1]

    def reopen(self, *, without: Request | None = None, launched: int = 0) -> None:
        """Open the books anew, whatever state an interrupt or an error left them in.

        Live requests wait, with the tokens they have, and are computed again; one that is left out has ended.
        This may be interrupted and repeated as well: until all is done, nothing is read but the requests.
        """
        for request in self._live:
            request.reset(self._clock())
        if without is not None and without.finish_reason is None:
            self._live.mark_ended(without, "abort", None)
        for request in self._live:
            if request.finish_reason is None and (end := request.end_by_token()) is not None:
                self._live.mark_ended(request, *end)
        self._queue.clear()
        self._beginnings.clear()
        self._admission.clear()
        self._adapters.clear()
        self._in_flight.clear(launched)
        self._batch.clear()
        self._kv_cache.clear()
        waiting = self._live.reopen()
        if self._listener is not None:
            self._listener.on_reopen(waiting, self._in_flight.num_launched)

    def check(self) -> None:
        """Every invariant of the queue, the batch, the tables and the pool; for tests, between calls."""
        running = {*self._batch.requests, *self._batch.draining}
        self._queue.check()
        self._live.check()
        self._beginnings.check(running)
        self._batch.check({request: self._in_flight.num_tokens(request) for request in running})
        holding = (*running, *self._live.pending_free)
        lengths = {request.request_id: self._batch.num_computed(request) for request in holding}
        self._kv_cache.check(lengths, {request.request_id for request in self._queue})

    def _launch(self, counts: Ints) -> SchedulerOutput:
        """The plan for so many tokens of each of the first rows, taken as launched from now on."""
        plan = self._planner.plan(counts)
        num = plan.num_rows
        self._in_flight.launch(plan, self._batch.requests[:num], self._batch.serials(num))
        self._batch.launch(plan)
        return plan

    def _take_in(
        self, launched: Launched, num_yielded: Ints, tokens: Ints
    ) -> tuple[list[Request], dict[Request, None]]:
        """Give each live request its tokens; returns who got any, and whose newest token may be the last."""
        gone = {*launched.foretold}  # they have these tokens, or have ended since
        notable: dict[Request, None] = {}
        for request in self._batch.take_in(launched, num_yielded, tokens):
            if request.finish_reason is not None:
                gone.add(request)
            elif request.row < 0:
                notable[request] = None
        received = launched.samplers()
        if len(tokens) == len(received):
            received, token_ids = _without(gone, received, tokens.tolist())
            notable |= dict.fromkeys(append_each(received, token_ids))
        else:
            received, parts = _without(gone, received, _split(tokens, num_yielded))
            ended = [r for r, part in zip(received, parts, strict=True) if r.append(part)]
            notable |= dict.fromkeys(ended)
        return received, notable

    def _force(self, received: list[Request], forced: Mapping[str, tuple[int, ...]]) -> dict[Request, int]:
        """Give each of these the tokens that are forced to follow, where that pays; returns how many each.

        A step that computes several tokens of a row is not one of the fast ones that decode, so the tokens
        that need no step of their own have to be worth it. Those up to the end of an answer need none at all.
        Where steps in flight have drafts, they wait until all tokens that these may yield are among them.
        """
        takes = {r: r.takes(forced[r.request_id]) for r in received if r.request_id in forced}
        takes = {r: own for r, own in takes.items() if own[1] or self._in_flight.may_foretell(r, own[0])}
        without = [(request, count) for request, (count, is_end) in takes.items() if not is_end]
        saved = sum(max(0, count - self._in_flight.num_tokens(request)) for request, count in without)
        pays = saved > 0 and saved >= MIXED_STEP_COST * len(self._batch)
        counts = {request: count for request, (count, is_end) in takes.items() if count and (pays or is_end)}
        for request, count in counts.items():
            request.force(forced[request.request_id][:count])
            self._in_flight.foretell(request, count)
            self._batch.force(request, count)
        self.num_forced_tokens += sum(counts.values())
        return counts

    def _release_unseen(self, launched: Launched, num_yielded: Ints) -> None:
        """Give back the blocks that left every window with a step that is over; none that it could undo."""
        plan = launched.plan
        dropped = plan.num_sampled_tokens - num_yielded  # drafts that did not hold
        computed = plan.num_computed_tokens + plan.num_scheduled_tokens - dropped
        for row in self._kv_cache.rows_past_a_window(plan.num_computed_tokens, computed).tolist():
            request = self._live.get(plan.request_ids[row])
            if request is not None and request.row >= 0:
                self._release(request, int(computed[row]), plan.step)

    @at_request
    def _release(self, request: Request, num_computed: int, step: int) -> None:
        self._kv_cache.release(request, num_computed, step)
        if self._listener is not None:
            self._listener.on_commit(request)

    def _restore(self, request: Request) -> bool:
        """Put a running request back as the steps still in flight leave it; False where there is no row."""
        in_flight = self._in_flight.num_tokens(request)
        if request.num_tokens + in_flight >= request.max_total_tokens:
            self._batch.drain(request)
        elif len(self._batch) < self.config.max_num_seqs:
            self._admission.give_row(request, computed=request.num_computed, in_flight=in_flight)
        else:
            return False
        return True


def _checked_counts(plan: SchedulerOutput, output: RunnerOutput) -> Ints:
    """How many tokens each row yielded, at least one of each that samples: all tokens that there are."""
    asked, num_tokens = plan.num_sampled_tokens, len(output.token_ids)
    if output.num_sampled is None:
        assert num_tokens == plan.num_samples, f"{num_tokens} tokens for {plan.num_samples} samples"
        return asked
    yielded, total = output.num_sampled, int(np.add.reduce(output.num_sampled))
    assert num_tokens == total, f"{num_tokens} tokens of rows that yielded {total}"
    is_right = np.array_equal(yielded > 0, asked > 0) and (yielded <= asked).all()
    assert is_right, f"rows yielded {yielded.tolist()} tokens where {asked.tolist()} were sampled"
    return yielded


def _split(tokens: Ints, num_yielded: Ints) -> list[list[int]]:
    """The tokens of each row that yielded any."""
    ends = np.cumsum(num_yielded[num_yielded > 0]).tolist()
    return [tokens[start:end].tolist() for start, end in itertools.pairwise((0, *ends))]


def _without(
    gone: Set[Request], requests: list[Request], news: list[News]
) -> tuple[list[Request], list[News]]:
    """Requests but for those, and what is new of each."""
    if not gone:
        return requests, news
    kept = [place for place, request in enumerate(requests) if request not in gone]
    return [requests[place] for place in kept], [news[place] for place in kept]
