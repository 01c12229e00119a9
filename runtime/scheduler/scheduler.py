"""What each step computes. There is no prefill and no decode, only "computed so far" and "to compute now"."""

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..protocol.scheduler_output import ON_HOST, Ints, Reports, SchedulerOutput
from .faults import at_request
from .in_flight import Launched
from .lifecycle import Lifecycle, end_by_token
from .logprob_requests import take_in_reports, wanted_reports
from .request import Request, RequestStatus

News = TypeVar("News")  # a token, or several


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

    # Rows, columns and blocks, those of each group, that tables of the step being planned have grown by.
    _grown: tuple[list[int], list[int], list[int]] = ([], [], [])

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None where nothing can be done before a step in flight is over, or at all."""
        preemptions = self.num_preemptions
        self._enter_filled()
        counts = self._advance_running()
        self._share_filled(counts)
        if np.count_nonzero(counts) < len(counts):
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
        num_sampled: Ints | None = None,
    ) -> list[Request]:
        """Take in the tokens of the oldest step in flight, row after row; returns who got any.

        num_sampled: how many each row yielded, 1 or more of one that samples; by default as many as the plan
        asks. Tokens after one that ends its request are dropped.
        """
        yielded = _checked_counts(plan, num_sampled, len(sampled))
        self._enter_filled()
        launched = self._in_flight.finish(plan)
        if self._beginning:
            self._note_begun(plan.step)
        if plan.reports is not None:
            rows = [self._requests.get(request_id) for request_id in plan.request_ids]
            take_in_reports(plan.reports, reports, launched.owners(yielded), rows)
        self._free_leaving()
        received = self._take_in(launched, yielded, np.asarray(sampled, np.int64))
        self._release_unseen(plan, yielded)
        return received

    def _advance_running(self) -> Ints:
        """Tokens to compute of each running request; 0 of those that sit the step out."""
        rows, num = self._rows, len(self._rows)
        total = rows.total[:num]
        self._grown = [], [], []
        wanted = self._at_most_a_chunk(total - rows.computed[:num])
        counts = self._within_budget(wanted)
        short = (total > rows.blocks[:num] * self._kv_cache.block_size).nonzero()[0]
        if not len(short):
            return counts
        all_advance = np.count_nonzero(counts) == num
        advancing = short if all_advance else short[counts[short] > 0]
        which = advancing.tolist()
        growing = [rows.requests[row] for row in which]
        block_ids = self._kv_cache.grow_each([request.request_id for request in growing])
        if block_ids is None:
            all_short = {rows.requests[row] for row in short.tolist()}
            by_rank = self._in_order(wanted, rows.by_rank, self._budget())
            return self._make_room_for_each(by_rank, all_short)
        if all_advance:  # then no row moves before the step is launched
            self._grown = which, rows.blocks[advancing].tolist(), block_ids
        else:
            rows.untold |= dict.fromkeys(growing)
        rows.blocks[advancing] += 1
        return counts

    def _within_budget(self, wanted: Ints) -> Ints:
        """What fits into the budget: first for those that want one token, as answers do, then for the others.

        So an answer goes on in every step, however long a prompt of better rank is. The first of all advances
        by one token at least, so that answers cannot keep it waiting either.
        """
        rows = self._rows
        lost = rows.out_of_reach()
        if lost is None and np.add.reduce(wanted) <= self._budget():
            return wanted
        by_rank = rows.by_rank
        order = by_rank[np.argsort(wanted[by_rank] > 1, kind="stable")]
        reserved = np.zeros_like(wanted)
        reserved[by_rank[0]] = lost is None and wanted[by_rank[0]] > 1
        return reserved + self._in_order(wanted - reserved, order, self._budget() - int(reserved.sum()))

    def _in_order(self, wanted: Ints, order: Ints, budget: int) -> Ints:
        """What fits into a budget of what rows want, in an order and up to the first that cannot advance."""
        lost, ordered = self._rows.out_of_reach(), wanted[order]
        if lost is not None:
            ordered[lost[order].argmax() :] = 0
        before = np.cumsum(ordered) - ordered
        counts = np.zeros_like(wanted)
        counts[order] = np.minimum(ordered, (budget - before).clip(0))
        return counts

    def _make_room_for_each(self, counts: Ints, short: Container[Request]) -> Ints:
        """The same counts, of those alone that have or get blocks for all their tokens before one cannot."""
        rows = self._rows
        parts = [(rows.requests[row], int(counts[row])) for row in rows.by_rank.tolist() if counts[row]]
        granted: dict[Request, int] = {}
        for request, count in parts:
            if request.row < 0:  # it was preempted, as all after it
                break
            if request in short and not self._make_room(request):
                break
            granted[request] = count
        return np.array([granted.get(request, 0) for request in rows.requests], np.int64)

    @at_request
    def _make_room(self, request: Request) -> bool:
        """Blocks for all tokens of a request, from younger ones if need be; False if it must wait.

        It waits for blocks that are on their way back. The youngest keeps what it has and sits the step out:
        older ones may end before they need its blocks.
        """
        rows = self._rows
        rows.untold[request] = None
        while not self._kv_cache.grow(request.request_id, int(rows.total[request.row])):
            youngest = rows.requests[rows.by_rank[-1]]
            if self._leaving or self._draining or request is youngest:
                return False
            self._preempt(youngest)
        rows.blocks[request.row] = self._kv_cache.num_blocks(request.request_id)
        return True

    def _share_filled(self, counts: Ints) -> None:
        """Let others find what the step fills of those that catch up: each finds it from now on."""
        for request in [*self._rows.filling]:
            self._share(request, int(counts[request.row]))

    @at_request
    def _share(self, request: Request, count: int) -> None:
        rows = self._rows
        computed, to_fill = int(rows.computed[request.row]), rows.filling[request]
        if computed < to_fill and count:
            end = min(computed + count, to_fill)
            self._kv_cache.commit(request, end, self._in_flight.next_step)
        if computed >= to_fill:
            del rows.filling[request]

    def _admit_waiting(self, counts: Ints) -> Ints:
        """Let waiting requests in, in order, while they fit and those that run have blocks to grow into."""
        more: list[int] = []
        room = self.config.max_num_seqs - len(self._rows)
        budget = self._budget() - int(np.add.reduce(counts)) if room and len(self._waiting) else 0
        while budget > 0 and len(self._rows) < self.config.max_num_seqs:
            request = self._next_to_admit()
            if request is None or not self._in_flight.is_over(request.last_step):  # its token is on its way
                break
            count = self._let_in(request, budget)
            if count is None:
                break
            more.append(count)
            budget -= count
        if not more:
            return counts
        return np.concatenate((counts, np.array(more, np.int64)))

    def _next_to_admit(self) -> Request | None:
        if self.alone is not None:
            return self.alone if self.alone in self._waiting else None
        return self._waiting.first() if len(self._waiting) else None

    @at_request
    def _let_in(self, request: Request, budget: int) -> int | None:
        """Give a waiting request blocks and a row; its tokens in this step, None where it must wait."""
        self._enter_filled()
        num_cached = self._kv_cache.admit(
            request,
            request.num_tokens,
            num_reusable=request.num_reusable,
            spare_blocks=self._spare_blocks(request),
            step=self._in_flight.next_step,
        )
        if num_cached is None:
            return None
        count = min(request.num_tokens - num_cached, budget, self.config.prefill_chunk or budget)
        self._admit(request, num_cached)
        self._filled = request, num_cached + count, self._in_flight.next_step
        return count

    def _spare_blocks(self, request: Request) -> int:
        """What is to be left when a request is let in: a block for each running one that can use it.

        For one that was preempted, twice as many each time: when nobody can use that many, it is safe.
        """
        rows, blocks_for, most = self._rows, self._kv_cache.blocks_for, 1 << min(request.num_preemptions, 40)
        room = rows.most_blocks[: len(rows)] - rows.blocks[: len(rows)]
        own = blocks_for(request.max_total_tokens - 1) - blocks_for(request.num_tokens)
        return int(np.add.reduce(np.minimum(room, most))) + min(own, most - 1)

    def _admit(self, request: Request, num_cached: int) -> None:
        self._give_row(request, computed=num_cached)
        self._waiting.discard(request)
        request.status = RequestStatus.RUNNING
        if not request.output_token_ids:
            self._starting[request] = None
        if request.times.first_scheduled is None:
            request.times.first_scheduled = self._clock()
        if not request.has_begun:
            is_looked_up = (
                self._kv_cache.prefix is not None and request.num_reusable == request.num_tokens - 1
            )
            queried = request.num_tokens if is_looked_up else 0
            request.num_cached_tokens = num_cached
            self._beginning[request] = self._in_flight.next_step, queried, num_cached

    def _note_begun(self, step: int) -> None:
        """A step is over, so what those that it let in have found was really there."""
        begun = {request: found for request, found in self._beginning.items() if found[0] == step}
        for request, (_, num_queried, num_hits) in begun.items():
            del self._beginning[request]
            request.has_begun = True
            self.num_queried_tokens += num_queried
            self.num_hit_tokens += num_hits

    def _launch(self, counts: Ints) -> SchedulerOutput:
        """The plan for so many tokens of each of the first rows, taken as launched from now on."""
        plan = self._plan(counts)
        rows, num = self._rows, plan.num_rows
        self._preempted_ids.clear()
        self._in_flight.launch(plan, rows.requests[:num], rows.serial[:num].copy())
        rows.launch(plan.step, plan.num_scheduled_tokens, plan.num_sampled_tokens)
        self._drain(num)
        return plan

    def _plan(self, counts: Ints) -> SchedulerOutput:
        """The plan for so many tokens of each of the first rows; the last that there is yields the next."""
        rows, num = self._rows, len(counts)
        computed, total = rows.computed[:num].copy(), rows.total[:num]
        num_sampled = (computed + counts == total).astype(np.int64)
        return SchedulerOutput(
            step=self._in_flight.next_step,
            request_ids=rows.request_ids(num),
            num_scheduled_tokens=counts,
            num_computed_tokens=computed,
            token_ids=rows.token_ids(counts),
            sources=np.where(total > rows.known[:num], rows.place[:num], ON_HOST),
            num_sampled_tokens=num_sampled,
            sampling=rows.sampling_of(num_sampled),
            banned=rows.banned(num_sampled),
            adjusted=rows.adjusted(num_sampled),
            new_blocks=self._new_blocks(),
            copies=self._kv_cache.copies(self._in_flight.next_step),
            preempted_ids=tuple(self._preempted_ids),
            reports=wanted_reports(rows, counts, num_sampled) if rows.reporters else None,
        )

    def _drain(self, num: int) -> None:
        """Those of the first rows that have all their tokens on their way need no row any more."""
        rows = self._rows
        leaving = (rows.total[:num] >= rows.limit[:num]).nonzero()[0].tolist()
        if leaving:
            self._draining |= {rows.requests[row].request_id: rows.requests[row] for row in leaving}
            rows.remove(leaving)

    def _new_blocks(self) -> Ints:
        """Table entries that the device has not: rows, columns, block ids."""
        most, num_groups = self.config.max_num_seqs, self._kv_cache.num_groups
        firsts = range(0, most * num_groups, most)  # of each group's rows
        grown, columns, block_ids = self._grown
        columns = columns * num_groups
        rows: list[int] = []
        blocks: list[int] = []
        for group, first in enumerate(firsts):
            rows += [first + row for row in grown]
            blocks += block_ids[group :: len(firsts)]
        for request in self._rows.untold:
            for first, table in zip(firsts, self._kv_cache.tables(request.request_id), strict=True):
                rows += [first + request.row] * len(table)
                columns += range(len(table))
                blocks += table
        self._rows.untold.clear()
        return np.array(rows + columns + blocks, np.int64).reshape(3, -1)

    def _take_in(self, launched: Launched, yielded: Ints, tokens: Ints) -> list[Request]:
        """Give each request that is live its tokens, and end it where one of them or the length says so."""
        requests, token_ids = launched.requests, tokens.tolist()
        notable: dict[Request, None] = {}  # the token may be their last
        gone: set[Request] = set()  # they have ended since
        for place in self._rows.take_in(requests, launched.serials, yielded, tokens):
            request = requests[place]
            if request.finish_reason is not None:
                gone.add(request)
            elif request.row < 0:
                notable[request] = None
        samplers = launched.samplers()
        if len(token_ids) == len(samplers):
            samplers, token_ids = _without(gone, samplers, token_ids)
            notable |= dict.fromkeys(_append_each(samplers, token_ids))
        else:
            ends = np.cumsum(yielded[yielded > 0]).tolist()
            parts = [token_ids[start:end] for start, end in itertools.pairwise((0, *ends))]
            samplers, parts = _without(gone, samplers, parts)
            notable |= dict.fromkeys(_append_several(samplers, parts))
        for request in [*self._starting]:
            if request.output_token_ids:
                request.times.first_token = self._clock()
                del self._starting[request]
        self._settle(notable)
        return samplers

    def _settle(self, notable: Iterable[Request]) -> None:
        """End those whose newest token stops them, or is the last that they may have."""
        ends = [(request, end_by_token(request)) for request in notable]
        rows = [request.row for request, end in ends if end is not None and request.row >= 0]
        self._rows.remove(rows)
        for request, end in ends:
            if end is not None:
                self._close(request, *end)

    def _release_unseen(self, plan: SchedulerOutput, yielded: Ints) -> None:
        """Give back the blocks that left every window with a step that is over; none that it could undo."""
        windows, size = {*self._kv_cache.windows} - {None}, self._kv_cache.block_size
        if not windows:
            return
        dropped = plan.num_sampled_tokens - yielded  # drafts that did not hold
        before_step = plan.num_computed_tokens
        computed, leaves = before_step + plan.num_scheduled_tokens - dropped, np.zeros(plan.num_rows, bool)
        for window in windows:
            assert window is not None
            unseen, before = ((ends - window + 1).clip(0) // size for ends in (computed, before_step))
            leaves |= unseen > before
        for row in np.flatnonzero(leaves).tolist():
            request = self._requests.get(plan.request_ids[row])
            if request is not None and request.row >= 0:
                self._release(request, int(computed[row]), plan.step)

    @at_request
    def _release(self, request: Request, num_computed: int, step: int) -> None:
        self._kv_cache.release(request, num_computed, step)

    def _budget(self) -> int:
        """Tokens of the step in all; fewer where it keeps someone waiting for the next token of an answer."""
        config, most = self.config, self.config.max_num_batched_tokens
        if config.max_prefill_tokens is not None:
            most = min(most, len(self._rows) + config.max_prefill_tokens)
        limit = config.max_tokens_beside_decode
        return most if limit is None or not self._rows.any_answers else min(limit, most)

    def _at_most_a_chunk(self, wanted: Ints) -> Ints:
        chunk = self.config.prefill_chunk
        return wanted if chunk is None else np.minimum(wanted, chunk)


def _checked_counts(plan: SchedulerOutput, num_sampled: Ints | None, num_tokens: int) -> Ints:
    """How many tokens each row yielded, which are as many as there are."""
    asked = plan.num_sampled_tokens
    yielded = asked if num_sampled is None else num_sampled
    total = plan.num_samples if num_sampled is None else int(np.add.reduce(num_sampled))
    assert num_tokens == total, f"{num_tokens} tokens for {total} samples"
    if num_sampled is not None:
        is_right = np.array_equal(num_sampled > 0, asked > 0) and (num_sampled <= asked).all()
        assert is_right, f"rows yielded {num_sampled.tolist()} tokens where {asked.tolist()} were sampled"
    return yielded


def _without(
    gone: set[Request], samplers: list[Request], news: list[News]
) -> tuple[list[Request], list[News]]:
    """The same of all but those."""
    if not gone:
        return samplers, news
    kept = [place for place, request in enumerate(samplers) if request not in gone]
    return [samplers[place] for place in kept], [news[place] for place in kept]


def _append_each(requests: list[Request], token_ids: list[int]) -> list[Request]:
    """A token for each of these; returns whom it may stop."""
    stopped = []
    for request, token in zip(requests, token_ids, strict=True):
        request.output_token_ids.append(token)
        if token in request.stop_token_ids:
            stopped.append(request)
    return stopped


def _append_several(requests: list[Request], parts: list[list[int]]) -> list[Request]:
    """Tokens for each of these, up to the first that ends it; returns whom one has ended."""
    ended = []
    for request, token_ids in zip(requests, parts, strict=True):
        for token in token_ids:
            request.output_token_ids.append(token)
            if end_by_token(request) is not None:
                ended.append(request)
                break
        del request.logprobs[len(request.output_token_ids) :]  # of tokens that are dropped
    return ended
