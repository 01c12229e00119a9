"""Who is admitted next: waiting requests get blocks and a row while they fit and the others can grow."""

from ..kv_cache.manager import KVCacheManager
from .adapter_slots import AdapterSlots
from .beginnings import Beginnings
from .config import SchedulerConfig
from .faults import at_request
from .in_flight import InFlight
from .request import Request
from .request_queue import RequestQueue
from .running_batch import RunningBatch


class Admission:
    """Moves requests from the queue into the running batch, with a block table.

    Blocks that admitted requests fill are committed when somebody looks for any who begins as one of them
    does, or before the next step, so that the device need not wait for their hashes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        adapters: AdapterSlots,
        queue: RequestQueue,
        batch: RunningBatch,
        kv_cache: KVCacheManager,
        in_flight: InFlight,
        beginnings: Beginnings,
    ) -> None:
        self._config, self._adapters = config, adapters
        self._queue, self._batch, self._kv_cache = queue, batch, kv_cache
        self._in_flight, self._beginnings = in_flight, beginnings
        # Who was admitted since, and how many tokens the step of that number fills of each.
        self._uncommitted: list[tuple[Request, int, int]] = []
        self._first_blocks: set[tuple[str, bytes]] = set()  # of theirs, with what parts them from others'

    @property
    def is_possible(self) -> bool:
        """Whether anybody waits, and there is a row for one more."""
        return len(self._queue) > 0 and len(self._batch) < self._config.max_num_seqs

    @property
    def num_possible(self) -> int:
        """How many of those who wait there are rows for."""
        return min(len(self._queue), self._config.max_num_seqs - len(self._batch))

    def admit(self, budget: int, alone: Request | None, most: int | None = None) -> list[int]:
        """Admit waiting requests in order, while they fit; returns the tokens of each in this step.

        budget: tokens that the step has left. alone: the only one to be admitted, if not None. most: how many
        are admitted, if there is a limit.
        """
        counts: list[int] = []
        most = self._config.max_num_seqs if most is None else most
        while budget > 0 and len(counts) < most and len(self._batch) < self._config.max_num_seqs:
            request = self._next(alone)
            if request is None or not self._in_flight.is_over(request.last_step):  # its token is in flight
                break
            if request.adapter is not None and not self._has_slot_for(request.adapter):
                break  # whoever comes after it waits, too: nobody who needs a slot is passed over for ever
            count = self._admit_one(request, budget)
            if count is None:
                break
            counts.append(count)
            budget -= count
        return counts

    def commit(self) -> None:
        """Let others find what the requests admitted so far fill."""
        uncommitted = self._uncommitted
        self.clear()
        for each in uncommitted:
            self._commit(*each)

    def clear(self) -> None:
        """Whatever is not committed is not to be."""
        self._uncommitted, self._first_blocks = [], set()

    @at_request
    def give_row(self, request: Request, *, computed: int, in_flight: int = 0) -> None:
        """A row for a request that has a block table; the last token that it may have needs no room."""
        self._batch.append(
            request,
            blocks=self._kv_cache.num_blocks(request.request_id),
            most_blocks=self._kv_cache.blocks_for(request.max_total_tokens - 1),
            computed=computed,
            in_flight=in_flight,
        )

    def _has_slot_for(self, adapter: str) -> bool:
        return self._adapters.has_room((*self._batch.requests, *self._batch.draining), adapter)

    def _next(self, alone: Request | None) -> Request | None:
        if alone is not None:
            return alone if alone in self._queue else None
        return self._queue.first() if len(self._queue) else None

    @at_request
    def _admit_one(self, request: Request, budget: int) -> int | None:
        """Give a waiting request blocks and a row; its tokens in this step, None where it must wait."""
        first_block = request.cache_salt, request.token_bytes(0, self._kv_cache.block_size)
        if first_block in self._first_blocks:
            self.commit()
        step = self._in_flight.next_step
        ahead = request.num_tokens + self._config.num_lookahead_tokens
        num_cached = self._kv_cache.admit(
            request,
            max(request.num_tokens, min(ahead, request.max_total_tokens - 1)),
            num_reusable=request.num_reusable,
            spare_blocks=self._spare_blocks(request),
            step=step,
        )
        if num_cached is None:
            return None
        count = min(request.num_tokens - num_cached, budget, self._config.prefill_chunk or budget)
        self.give_row(request, computed=num_cached)
        self._queue.discard(request)
        is_queried = self._kv_cache.prefix is not None and request.num_reusable == request.num_tokens - 1
        num_queried = request.num_tokens if is_queried else 0
        self._beginnings.admit(request, step, num_queried=num_queried, num_hits=num_cached)
        self._uncommitted.append((request, num_cached + count, step))
        self._first_blocks.add(first_block)
        return count

    def _spare_blocks(self, request: Request) -> int:
        """What is to be left when a request is admitted: a block for each running one that can use it.

        For one that was preempted, twice as many each time: when nobody can use that many, it is safe.
        """
        most, blocks_for = 1 << min(request.num_preemptions, 40), self._kv_cache.blocks_for
        own = blocks_for(request.max_total_tokens - 1) - blocks_for(request.num_tokens)
        return self._batch.blocks_to_grow(most) + min(own, most - 1)

    @at_request
    def _commit(self, request: Request, num_tokens: int, step: int) -> None:
        self._kv_cache.commit(request, num_tokens, step)
