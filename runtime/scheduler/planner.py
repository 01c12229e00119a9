"""What the next step computes: decode tokens, chunked prefill, blocks for them, and who is admitted."""

from collections.abc import Container

import numpy as np

from ..kv_cache.manager import KVCacheManager
from ..protocol.scheduler_output import Ints, SchedulerOutput
from .adapter_slots import AdapterSlots
from .admission import Admission
from .budget import batch_of, in_order, share_out, step_budget
from .config import SchedulerConfig
from .drafting import Drafting
from .faults import at_request
from .in_flight import InFlight
from .live_requests import LiveRequests
from .logprob_requests import wanted_logprobs
from .pooling_requests import wanted_pooling
from .request import Request
from .running_batch import RunningBatch


class Planner:
    """Decides from counts alone who of the running batch advances by how many tokens, and writes the plan."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        adapters: AdapterSlots,
        batch: RunningBatch,
        kv_cache: KVCacheManager,
        in_flight: InFlight,
        live: LiveRequests,
        admission: Admission,
        drafting: Drafting,
    ) -> None:
        self._config, self._drafting, self._adapters = config, drafting, adapters
        self._batch, self._kv_cache, self._in_flight = batch, kv_cache, in_flight
        self._live, self._admission = live, admission

    def counts(self, alone: Request | None) -> Ints:
        """Tokens to compute of each of the first rows, at least 1; none where nobody can advance.

        alone: the only request to be admitted, if not None.
        """
        if self._config.num_batches > 1:
            return self._counts_of_batch(alone)
        num_preemptions = self._live.num_preemptions
        counts = self._advance_running()
        self._commit_filled(counts)
        if np.count_nonzero(counts) < len(counts):
            return self._batch.put_first(counts)
        if self._live.num_preemptions > num_preemptions:
            return counts
        if not self._admission.is_possible:
            return counts
        more = self._admission.admit(self._left_for_others(counts), alone)
        return np.concatenate((counts, np.array(more, np.int64))) if more else counts

    def plan(self, counts: Ints) -> SchedulerOutput:
        """The plan for so many tokens of each of the first rows; the last that there is yields the next."""
        batch, num, step = self._batch, len(counts), self._in_flight.next_step
        sampling, num_sampled, token_ids = batch.sampling, batch.num_sampled(counts), batch.token_ids(counts)
        drafts = self._drafting.drafts(num_sampled, self._kv_cache.block_size)
        if drafts is not None:
            self._drafting.put(token_ids, counts, num_sampled, drafts)
        is_one_each = int(np.add.reduce(num_sampled)) == num == np.count_nonzero(num_sampled)
        return SchedulerOutput(
            step=step,
            request_ids=batch.request_ids(num),
            num_scheduled_tokens=counts,
            num_computed_tokens=batch.computed(num),
            token_ids=token_ids,
            sources=batch.sources(num),
            num_sampled_tokens=num_sampled,
            sampling=sampling.parameters(num_sampled, is_one_each=is_one_each),
            banned=sampling.banned(num_sampled),
            adjusted=sampling.adjusted(num_sampled, is_one_each=is_one_each),
            new_blocks=batch.new_blocks(self._kv_cache),
            copies=self._kv_cache.copies(step),
            preempted_ids=self._live.take_preempted_ids(),
            wanted_logprobs=wanted_logprobs(batch, counts, num_sampled) if sampling.reporters else None,
            pooling=wanted_pooling(batch, num_sampled) if sampling.poolers else None,
            drafts=drafts,
            adapters=self._adapters.assign(batch.requests, num) if self._config.max_loras else None,
        )

    def _counts_of_batch(self, alone: Request | None) -> Ints:
        """The same where other batches are in flight, which share no request but for chunks of a prompt.

        Requests are shared out evenly among as many batches as can be in flight. Who is in one of them sits
        the others out, and others are admitted meanwhile, unless blocks are short.
        """
        batch, admission = self._batch, self._admission
        num_live = batch.num_running + admission.num_possible
        most_rows = -(-num_live // self._config.num_batches)
        wanted = self._wanted()
        planned = batch_of(wanted, batch.by_rank, self._budget(), batch.out_of_reach(), most_rows)
        counts, short = self._with_drafts(planned), None
        if counts is None:
            counts, short = planned, self._grow(planned)
        if short is not None:
            counts = self._make_room_for_each(planned, {batch.requests[row] for row in short.tolist()})
        self._commit_filled(counts)
        left = most_rows - int(np.count_nonzero(counts))
        if short is None and left > 0 and admission.is_possible:
            more = admission.admit(self._left_for_others(counts), alone, left)
            counts = np.concatenate((counts, np.array(more, np.int64)))
        num_advancing = int(np.count_nonzero(counts))
        return batch.put_first(counts) if 0 < num_advancing < len(counts) else counts[:num_advancing]

    def _wanted(self) -> Ints:
        """Tokens of each running request that could be computed, in chunks."""
        uncomputed, chunk = self._batch.uncomputed(), self._config.prefill_chunk
        return uncomputed if chunk is None else np.minimum(uncomputed, chunk)

    def _advance_running(self) -> Ints:
        """Tokens to compute of each running request; 0 of those that sit the step out."""
        batch, wanted = self._batch, self._wanted()
        counts = self._within_budget(wanted)
        if (with_drafts := self._with_drafts(counts)) is not None:
            return with_drafts
        short = self._grow(counts)
        if short is None:
            return counts
        by_rank = in_order(wanted, batch.by_rank, self._budget(), batch.out_of_reach())
        return self._make_room_for_each(by_rank, {batch.requests[row] for row in short.tolist()})

    def _with_drafts(self, counts: Ints) -> Ints | None:
        """The same with drafts beside, and blocks for all; None where there are none, or blocks are short."""
        if not self._drafting.is_on:
            return None
        drafts = self._drafting.each(counts, is_full=not self._admission.is_possible)
        if drafts is None or self._grow(counts, drafts) is not None:
            return None
        return counts + drafts

    def _grow(self, counts: Ints, num_drafts: Ints | int = 0) -> Ints | None:
        """Blocks for all rows that advance; returns who lacks some, and nothing is done, if blocks are short.

        num_drafts: to be computed beyond the newest token, of all rows or of each. Where there are
        enough, there are blocks for the tokens ahead of these, too.
        """
        ahead = self._config.num_lookahead_tokens
        if ahead and self._grow_by(counts, num_drafts + ahead) is None:
            return None
        return self._grow_by(counts, num_drafts)

    def _grow_by(self, counts: Ints, num_drafts: Ints | int) -> Ints | None:
        batch = self._batch
        short = batch.drafts.short_of_blocks(len(batch), self._kv_cache.block_size, num_drafts)
        if not len(short):
            return None
        all_advance = np.count_nonzero(counts) == len(counts)
        advancing = short if all_advance else short[counts[short] > 0]
        block_ids = self._kv_cache.grow_each([batch.requests[row].request_id for row in advancing.tolist()])
        if block_ids is None:
            return short
        batch.grow(advancing, block_ids, rows_stay=all_advance)
        return None

    def _left_for_others(self, counts: Ints) -> int:
        """Tokens that the step has left for who is admitted; drafts take none of what prompts may have."""
        most = self._config.max_num_batched_tokens - int(np.add.reduce(counts))
        if not self._drafting.is_on:
            return min(most, self._budget() - int(np.add.reduce(counts)))
        num_drafts = (self._batch.num_sampled(counts) - 1).clip(0)
        return min(most, self._budget() - int((counts - num_drafts).sum()))

    def _within_budget(self, wanted: Ints) -> Ints:
        budget, stuck = self._budget(), self._batch.out_of_reach()
        if stuck is None and np.add.reduce(wanted) <= budget:
            return wanted
        return share_out(wanted, self._batch.by_rank, budget, stuck)

    def _budget(self) -> int:
        is_asked = self._config.max_tokens_beside_decode is not None
        any_answers = is_asked and self._batch.any_answers
        return step_budget(self._config, len(self._batch), any_answers=any_answers)

    def _make_room_for_each(self, counts: Ints, short: Container[Request]) -> Ints:
        """The same counts, of those alone that have or get blocks for all their tokens before one cannot."""
        batch = self._batch
        parts = [(batch.requests[row], int(counts[row])) for row in batch.by_rank.tolist() if counts[row]]
        granted: dict[Request, int] = {}
        for request, count in parts:
            if request.row < 0:  # it was preempted, as all after it
                break
            if request in short and not self._make_room(request):
                break
            granted[request] = count
        return np.array([granted.get(request, 0) for request in batch.requests], np.int64)

    @at_request
    def _make_room(self, request: Request) -> bool:
        """Blocks for all tokens of a request, from younger ones if need be; False if it must wait.

        It waits for blocks that are pending free. The youngest keeps what it has and sits the step out: older
        ones may end before they need its blocks.
        """
        batch, kv_cache = self._batch, self._kv_cache
        while not kv_cache.grow(request.request_id, int(batch.drafts.most_tokens(request.row))):
            youngest = batch.requests[batch.by_rank[-1]]
            if self._live.pending_free or batch.draining or request is youngest:
                return False
            self._live.preempt(youngest)
        batch.resize_table(request, kv_cache.num_blocks(request.request_id))
        return True

    def _commit_filled(self, counts: Ints) -> None:
        """Let others find what the step fills of those that catch up: each finds it from now on."""
        for request, num_tokens in self._batch.fills(counts):
            self._commit(request, num_tokens)

    @at_request
    def _commit(self, request: Request, num_tokens: int) -> None:
        self._kv_cache.commit(request, num_tokens, self._in_flight.next_step)
