"""Every live request, and its ways out of the running batch: preemption or its end, which free its blocks."""

from collections.abc import Callable, Collection, Iterator, Set

from ..kv_cache.manager import KVCacheManager
from ..protocol.engine_output import FinishReason
from .beginnings import Beginnings
from .faults import at_request
from .in_flight import InFlight
from .listener import Listener
from .request import Request, RequestStatus
from .request_queue import RequestQueue
from .running_batch import RunningBatch


class LiveRequests:
    """Requests by id, from when they are queued until they have ended and their blocks are free.

    Blocks that a step in flight may write are given back when it is over, and only then: until then those of
    a request that ended or was preempted are pending free.
    """

    def __init__(
        self,
        *,
        queue: RequestQueue,
        batch: RunningBatch,
        kv_cache: KVCacheManager,
        in_flight: InFlight,
        beginnings: Beginnings,
        listener: Listener | None,
        clock: Callable[[], float],
    ) -> None:
        self._queue, self._batch, self._kv_cache = queue, batch, kv_cache
        self._in_flight, self._beginnings = in_flight, beginnings
        self._listener, self._clock = listener, clock
        self._requests: dict[str, Request] = {}
        self._pending_free: list[Request] = []  # ended or preempted while a step may write their blocks
        self._preempted_ids: list[str] = []  # since the last plan
        self.num_preemptions = 0
        self.num_finished = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._requests.values()])

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def get(self, request_id: str) -> Request | None:
        """The request of that id, if it is live."""
        return self._requests.get(request_id)

    @property
    def ids(self) -> Set[str]:
        """Every request that waits or runs, or has ended while a step may write its blocks."""
        return self._requests.keys()

    @property
    def pending_free(self) -> list[Request]:
        """Those whose blocks a step in flight may write, though they run no more; to be read alone."""
        return self._pending_free

    def add(self, request: Request) -> None:
        """Queue a request that has just come."""
        self._requests[request.request_id] = request
        self._queue.add(request, self._clock())

    @at_request
    def preempt(self, request: Request) -> None:
        """Back to the queue, at the place of its rank, with its tokens and without its blocks."""
        self._batch.discard(request)
        request.preempt()
        self._queue.append(request)
        self.num_preemptions += 1
        self._preempted_ids.append(request.request_id)
        self._give_back(request)

    @at_request
    def end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End a live request wherever it stands."""
        self._batch.discard(request)
        self._queue.discard(request)
        self._beginnings.discard(request)
        self.mark_ended(request, reason, stop_reason)
        if request not in self._pending_free:
            self._give_back(request)

    def end_by_tokens(self, requests: Collection[Request]) -> None:
        """End those whose newest token stops them, or is the last that they may have."""
        if not requests:
            return
        ends = [(request, end) for request in requests if (end := request.end_by_token()) is not None]
        self._batch.remove([request.row for request, _ in ends if request.row >= 0])
        for request, (reason, stop_reason) in ends:
            self.end(request, reason, stop_reason)

    def mark_ended(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Say of a request that it has ended, and count it, whatever it still holds."""
        request.end(reason, stop_reason, self._clock())
        self.num_finished += request.is_counted

    def count_finished(self) -> None:
        """Count one more finished request: one that was served by others, which are not counted."""
        self.num_finished += 1

    def free_pending(self) -> None:
        """A step is over: give back blocks that only it and earlier ones could write."""
        if not self._pending_free:
            return
        pending, self._pending_free = self._pending_free, []
        for request in pending:
            self._give_back(request)

    def take_preempted_ids(self) -> tuple[str, ...]:
        """Who was preempted since this was called last."""
        if not self._preempted_ids:
            return ()
        preempted, self._preempted_ids = self._preempted_ids, []
        return tuple(preempted)

    def reopen(self) -> list[Request]:
        """Have live requests wait and nothing pending; returns them by rank.

        May be interrupted and called again, as only the requests themselves are read.
        """
        live = sorted((r for r in self._requests.values() if r.finish_reason is None), key=lambda r: r.rank)
        self._pending_free.clear()
        self._preempted_ids.clear()
        self._requests = {request.request_id: request for request in live}
        for request in live:
            self._queue.restore(request)
        return live

    def check(self) -> None:
        """Every live request is in one place, whose status it has; for tests, between calls."""
        running = {*self._batch.requests, *self._batch.draining}
        ended = [request for request in self._pending_free if request.finish_reason is not None]
        assert all(request.status is RequestStatus.RUNNING for request in running)
        for request in self._queue:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), request
        for request in (*self._queue, *ended):
            assert request.row == -1, request
        for request in (*self._batch.draining, *self._pending_free):
            assert not self._in_flight.is_over(request.last_step), request
        known = {request.request_id for request in (*running, *self._queue, *ended)}
        assert self._requests.keys() == known, "a request was lost or kept"

    @at_request
    def _give_back(self, request: Request) -> None:
        """Free a request's blocks, now or when no step in flight may write them; what they hold is kept."""
        if self._in_flight.is_over(request.last_step):
            self._free(request)
        else:
            self._pending_free.append(request)
        if self._listener is not None and request.finish_reason is None:
            self._listener.on_commit(request)

    def _free(self, request: Request) -> None:
        self._kv_cache.commit(request, min(request.num_computed, request.num_tokens), request.last_step)
        request.give_back()
        if request.status is RequestStatus.FINISHED:
            self._kv_cache.free(request.request_id)
            del self._requests[request.request_id]
        else:
            self._kv_cache.suspend(request.request_id)
