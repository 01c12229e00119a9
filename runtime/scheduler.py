"""What each step computes. There is no prefill and no decode, only "computed so far" and "to compute now"."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .lifecycle import Lifecycle
from .reporting import take_in_reports, wanted_reports
from .request import Request, RequestStatus
from .scheduler_output import ON_HOST, Ints, Reports, SchedulerOutput


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
        if len(counts) == len(self._rows) and self.num_preemptions == preemptions:
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
        are_rows = launched.version == self._rows.version and len(samplers) == len(self._rows)
        received = self._take_in(samplers, np.asarray(sampled, np.int64), are_rows)
        self._release_unseen(plan)
        return received

    def _advance_running(self) -> Ints:
        """Tokens to compute of each running request, up to the first that has to sit the step out."""
        rows = self._rows
        num = rows.num_in_reach()
        total = rows.total[:num]
        counts = self._at_most_a_chunk(total - rows.computed[:num])
        budget = self._budget()
        if counts.sum() > budget:
            before = np.cumsum(counts) - counts
            counts = np.minimum(counts, budget - before)[before < budget]
        short = np.flatnonzero(total[: len(counts)] > rows.blocks[: len(counts)] * self._kv_cache.block_size)
        if not len(short):
            return counts
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

    def _share_filled(self, counts: Ints) -> None:
        """Let others find what the step fills of those that catch up: each finds it from now on."""
        rows, num = self._rows, len(counts)
        for row in np.flatnonzero(rows.computed[:num] < rows.to_fill[:num]).tolist():
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
        counts = np.concatenate((counts, np.array(more, np.int64)))
        moved = self._rows.sort()
        return counts if moved is None else counts[moved]

    def _spare_blocks(self, request: Request) -> int:
        """What is to be left when a request is let in: a block for each running one that can use it.

        For one that was preempted, twice as many each time: when nobody can use that many, it is safe.
        """
        rows, size, most = self._rows, self._kv_cache.block_size, 1 << min(request.num_preemptions, 40)
        room = (rows.limit[: len(rows)] - 1 + size - 1) // size - rows.blocks[: len(rows)]
        own = -(-(request.max_total_tokens - 1) // size) - -(-request.num_tokens // size)
        return int(np.minimum(room, most).sum()) + min(own, most - 1)

    def _admit(self, request: Request, num_cached: int) -> None:
        blocks = self._kv_cache.num_blocks(request.request_id)
        self._rows.append(request, blocks=blocks, computed=num_cached)
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
            adjusted=rows.adjusted(samples),
            moved_from=rows.move_tables(),
            new_blocks=self._new_blocks(),
            copies=self._kv_cache.copies(self._in_flight.next_step),
            preempted_ids=tuple(self._preempted_ids),
            reports=wanted_reports(rows, counts, samples) if rows.reporters else None,
        )
        self._preempted_ids.clear()
        self._in_flight.launch(plan, requests, rows.version)
        self._count_launched(plan)
        return plan

    def _count_launched(self, plan: SchedulerOutput) -> None:
        rows, num = self._rows, plan.num_rows
        rows.computed[:num] += plan.counts
        rows.in_flight[:num] += plan.samples
        rows.total[:num] += plan.samples
        rows.last_step[:num] = plan.step
        rows.place[: len(rows)] = ON_HOST
        rows.place[:num][plan.samples] = np.arange(plan.num_samples)
        drained = rows.total[:num] >= rows.limit[:num]
        if drained.any():
            leaving = np.flatnonzero(drained)
            self._draining |= {plan.request_ids[row]: rows.requests[row] for row in leaving.tolist()}
            rows.remove(leaving)

    def _new_blocks(self) -> Ints:
        """Table entries that the device has not: rows, columns, block ids; group after group of all rows."""
        rows, num = self._rows, len(self._rows)
        places: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        which = np.flatnonzero(rows.blocks[:num] != rows.sent[:num])
        counts = zip(which.tolist(), rows.sent[which].tolist(), rows.blocks[which].tolist(), strict=True)
        groups = [(group, group * self.config.max_num_seqs) for group in range(self._kv_cache.num_groups)]
        for row, sent, own in counts:
            request_id = rows.requests[row].request_id
            for group, first in groups:
                places += [first + row] * (own - sent)
                columns += range(sent, own)
                blocks += self._kv_cache.block_ids(request_id, sent, group)
        rows.sent[which] = rows.blocks[which]
        return np.array((places, columns, blocks), np.int64)

    def _take_in(self, samplers: list[Request], tokens: Ints, are_rows: bool) -> list[Request]:
        """Give each request that is live its token, and end it where that or the length says so.

        Where they are the rows, one by one, nobody has to be asked where it stands.
        """
        rows, token_ids = self._rows, tokens.tolist()
        notable: dict[Request, int] = {}
        at: Ints | slice = slice(len(rows))
        if not are_rows:
            at = np.array([request.row for request in samplers], np.int64)
            away = np.flatnonzero(at < 0).tolist()  # they have left their rows: to end, or as they have
            if away:
                at, tokens = at[at >= 0], tokens[at >= 0]
                ended = [place for place in away if samplers[place].finish_reason is not None]
                notable = {samplers[place]: token_ids[place] for place in away if place not in ended}
                samplers = samplers.copy()
                for place in reversed(ended):
                    del samplers[place], token_ids[place]
        rows.known[at] += 1
        rows.in_flight[at] -= 1
        rows.newest[at] = tokens
        for request, token in zip(samplers, token_ids, strict=True):
            request.output_token_ids.append(token)
            if token in request.stop_token_ids:
                notable[request] = token
        has_first = rows.known[at] == rows.num_prompt[at] + 1
        if has_first.any():
            for row in np.arange(len(rows))[at][has_first].tolist():
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
