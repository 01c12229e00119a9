"""What each step computes. There is no prefill and no decode, only "computed so far" and "to compute now"."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .lifecycle import Lifecycle
from .reporting import take_in_reports, wanted_reports
from .request import Request, RequestStatus
from .scheduler_output import ON_HOST, Flags, Ints, Reports, SchedulerOutput


class Scheduler(Lifecycle):
    """By rank, and always in that order: first come, first served, where all have the same priority.

    Steps are planned from counts alone, so that the next can be launched before the tokens of the last are
    read: a request that has all its tokens on their way is "draining", and only an id or text that stops
    costs a token computed in vain, which is dropped.

    A request is admitted when all its known tokens fit the cache and those before it can grow, so only new
    tokens can find it full. Then the running request that ranks last gives up its blocks, keeps its tokens,
    and waits to be computed again, for twice the room to grow each time. The first is never preempted, so
    something always advances. Blocks that a step in flight may write are given back when it is over; who
    needs them waits, and everyone after it. Blocks that a step in flight fills can be shared at once: what
    reads them runs after it, or, in the same step, after all keys and values of a layer are written.
    """

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None where nothing can be done before a step in flight is over, or at all."""
        preemptions = self.num_preemptions
        counts = self._advance_running()
        self._share_filled(counts)
        if not counts.all():
            counts = self._rows.put_first(counts)
        elif self.num_preemptions == preemptions:
            counts = self._admit_waiting(counts)
        if not len(counts):
            assert len(self._in_flight) or not self.has_work, "requests are live, but none can advance"
            return None
        return self._launch(counts)

    def update(
        self,
        plan: SchedulerOutput,
        sampled: Sequence[int] | NDArray[np.int32],
        reports: Reports | None = None,
    ) -> list[Request]:
        """Take in the tokens of the oldest step in flight, one a row that samples; returns who got one."""
        assert len(sampled) == plan.num_samples, f"{len(sampled)} tokens for {plan.num_samples} samples"
        launched = self._in_flight.finish(plan)
        samplers = launched.samplers()
        if plan.reports is not None:
            rows = [self._requests.get(request_id) for request_id in plan.request_ids]
            take_in_reports(plan.reports, reports, samplers, rows)
        self._free_leaving()
        at = self._rows.find(launched.requests, launched.serials)
        received = self._take_in(samplers, at[plan.samples], np.asarray(sampled, np.int64))
        self._release_unseen(plan)
        return received

    def _advance_running(self) -> Ints:
        """Tokens to compute of each running request; 0 of those that sit the step out."""
        rows, num = self._rows, len(self._rows)
        counts = self._within_budget(self._at_most_a_chunk(rows.total[:num] - rows.computed[:num]))
        short = rows.total[:num] > rows.blocks[:num] * self._kv_cache.block_size
        if not short.any():
            return counts
        which = np.flatnonzero(short & (counts > 0))
        if self._kv_cache.grow_each([rows.requests[row].request_id for row in which.tolist()]):
            rows.blocks[which] += 1
            return counts
        return self._make_room_for_each(counts, short)

    def _within_budget(self, counts: Ints) -> Ints:
        """The same counts by rank, as far as the budget goes and up to the first that cannot advance."""
        rows, budget = self._rows, self._budget()
        lost = rows.out_of_reach()
        if lost is None and counts.sum() <= budget:
            return counts
        order = rows.by_rank
        ranked = counts[order]
        if lost is not None:
            ranked[lost[order].argmax() :] = 0
        before = np.cumsum(ranked) - ranked
        counts[order] = np.minimum(ranked, (budget - before).clip(0))
        return counts

    def _make_room_for_each(self, counts: Ints, short: Flags) -> Ints:
        """The same counts, of those alone that have or get blocks for all their tokens before one cannot."""
        rows, counted = self._rows, [row for row in self._rows.by_rank.tolist() if counts[row]]
        parts = [(rows.requests[row], int(counts[row]), bool(short[row])) for row in counted]
        granted: dict[Request, int] = {}
        for request, count, is_short in parts:
            if request.row < 0:  # it was preempted, as all after it
                break
            if is_short and not self._make_room(request):
                break
            granted[request] = count
        return np.array([granted.get(request, 0) for request in rows.requests], np.int64)

    def _make_room(self, request: Request) -> bool:
        """Blocks for all tokens of a request, from younger ones if need be; False if it must wait.

        It waits for blocks that are on their way back. The youngest keeps what it has and sits the step out:
        older ones may end before they need its blocks.
        """
        rows = self._rows
        while not self._kv_cache.grow(request.request_id, int(rows.total[request.row])):
            youngest = rows.requests[rows.by_rank[-1]]
            if self._leaving or self._draining or request is youngest:
                return False
            self._preempt(youngest)
        rows.blocks[request.row] = self._kv_cache.num_blocks(request.request_id)
        return True

    def _share_filled(self, counts: Ints) -> None:
        """Let others find what the step fills of those that catch up: each finds it from now on."""
        rows, num = self._rows, len(counts)
        catching_up = (counts > 0) & (rows.computed[:num] < rows.to_fill[:num])
        for row in np.flatnonzero(catching_up).tolist():
            end = min(int(rows.computed[row] + counts[row]), int(rows.to_fill[row]))
            self._kv_cache.commit(rows.requests[row], end, self._in_flight.next_step)

    def _admit_waiting(self, counts: Ints) -> Ints:
        """Let waiting requests in, in order, while they fit and those that run have blocks to grow into."""
        more: list[int] = []
        room = self.config.max_num_seqs - len(self._rows)
        budget = self._budget() - int(counts.sum()) if room and len(self._waiting) else 0
        while len(self._waiting) and budget > 0 and len(self._rows) < self.config.max_num_seqs:
            request = self._waiting.first()
            if not self._in_flight.is_over(request.last_step):  # its token is on its way
                break
            num_cached = self._kv_cache.admit(
                request,
                request.num_tokens,
                num_reusable=request.num_reusable,
                spare_blocks=self._spare_blocks(request),
                step=self._in_flight.next_step,
            )
            if num_cached is None:
                break
            more.append(min(request.num_tokens - num_cached, budget, self.config.prefill_chunk or budget))
            budget -= more[-1]
            self._admit(request, num_cached)
            self._kv_cache.commit(request, num_cached + more[-1], self._in_flight.next_step)
        if not more:
            return counts
        return np.concatenate((counts, np.array(more, np.int64)))

    def _spare_blocks(self, request: Request) -> int:
        """What is to be left when a request is let in: a block for each running one that can use it.

        For one that was preempted, twice as many each time: when nobody can use that many, it is safe.
        """
        rows, blocks_for, most = self._rows, self._kv_cache.blocks_for, 1 << min(request.num_preemptions, 40)
        room = rows.most_blocks[: len(rows)] - rows.blocks[: len(rows)]
        own = blocks_for(request.max_total_tokens - 1) - blocks_for(request.num_tokens)
        return int(np.minimum(room, most).sum()) + min(own, most - 1)

    def _admit(self, request: Request, num_cached: int) -> None:
        self._give_row(request, computed=num_cached)
        self._waiting.discard(request)
        request.status = RequestStatus.RUNNING
        if request.times.first_scheduled is None:
            request.times.first_scheduled = self._clock()
            request.num_cached_tokens = num_cached
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += num_cached

    def _launch(self, counts: Ints) -> SchedulerOutput:
        """The plan for so many tokens of each of the first rows, taken as launched from now on."""
        rows, num = self._rows, len(counts)
        samples = rows.computed[:num] + counts == rows.total[:num]
        sources = np.where(rows.total[:num] > rows.known[:num], rows.place[:num], ON_HOST)
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
            adjusted=rows.adjusted(samples),
            new_blocks=self._new_blocks(),
            copies=self._kv_cache.copies(self._in_flight.next_step),
            preempted_ids=tuple(self._preempted_ids),
            reports=wanted_reports(rows, counts, samples) if rows.reporters else None,
        )
        self._preempted_ids.clear()
        self._in_flight.launch(plan, requests, rows.serial[:num].copy())
        self._count_launched(plan)
        return plan

    def _count_launched(self, plan: SchedulerOutput) -> None:
        rows, num = self._rows, plan.num_rows
        rows.computed[:num] += plan.counts
        rows.total[:num] += plan.samples
        rows.last_step[:num] = plan.step
        rows.place[: len(rows)] = ON_HOST
        rows.place[:num][plan.samples] = np.arange(plan.num_samples)
        drained = rows.total[:num] >= rows.limit[:num]
        if drained.any():
            leaving = np.flatnonzero(drained)
            self._draining |= {plan.request_ids[row]: rows.requests[row] for row in leaving.tolist()}
            rows.remove(leaving.tolist())

    def _new_blocks(self) -> Ints:
        """Table entries that the device has not: rows, columns, block ids; group after group of all rows."""
        rows, num = self._rows, len(self._rows)
        which = np.flatnonzero(rows.blocks[:num] != rows.sent[:num])
        first, end = rows.sent[which], rows.blocks[which]
        rows.sent[which] = end
        num_new = end - first
        places = np.repeat(which, num_new)
        columns = np.arange(len(places)) - np.repeat(np.cumsum(num_new) - end, num_new)
        names, starts = [rows.requests[row].request_id for row in which.tolist()], first.tolist()
        parts = [
            (places + group * self.config.max_num_seqs, columns, self._kv_cache.columns(names, starts, group))
            for group in range(self._kv_cache.num_groups)
        ]
        return np.concatenate([np.array(part, np.int64) for part in parts], axis=1)

    def _take_in(self, samplers: list[Request], at: Ints, tokens: Ints) -> list[Request]:
        """Give each request that is live its token, and end it where that or the length says so.

        at: their rows, -1 of those that have left: to end, or as they have ended.
        """
        rows, token_ids = self._rows, tokens.tolist()
        notable: dict[Request, int] = {}
        away = np.flatnonzero(at < 0).tolist()
        if away:
            at, tokens = at[at >= 0], tokens[at >= 0]
            ended = [place for place in away if samplers[place].finish_reason is not None]
            notable = {samplers[place]: token_ids[place] for place in away if place not in ended}
            samplers = samplers.copy()
            for place in reversed(ended):
                del samplers[place], token_ids[place]
        known = rows.known[at] + 1
        rows.known[at] = known
        rows.newest[at] = tokens
        for request, token in zip(samplers, token_ids, strict=True):
            request.output_token_ids.append(token)
            if token in request.stop_token_ids:
                notable[request] = token
        has_first = known == rows.num_prompt[at] + 1
        if has_first.any():
            for row in at[has_first].tolist():
                notable[rows.requests[row]] = rows.requests[row].output_token_ids[-1]
        self._settle(notable)
        return samplers

    def _settle(self, notable: Mapping[Request, int]) -> None:
        """Of requests with a token that may be the last or was the first."""
        stopped = []
        for request, token in notable.items():
            if request.times.first_token is None:
                request.times.first_token = self._clock()
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

    def _release_unseen(self, plan: SchedulerOutput) -> None:
        """Give back the blocks that left every window with a step that is over; none that it could undo."""
        windows, size = {*self._kv_cache.windows} - {None}, self._kv_cache.block_size
        if not windows:
            return
        computed, leaves = plan.num_computed + plan.counts, np.zeros(plan.num_rows, bool)
        for window in windows:
            assert window is not None
            unseen, before = ((ends - window + 1).clip(0) // size for ends in (computed, plan.num_computed))
            leaves |= unseen > before
        for row in np.flatnonzero(leaves).tolist():
            request = self._requests.get(plan.request_ids[row])
            if request is not None and request.row >= 0:
                self._release(request, int(computed[row]), plan.step)

    def _release(self, request: Request, num_computed: int, step: int) -> None:
        self._kv_cache.release(request, num_computed, step)

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
