"""The request queue: who waits, in order of rank, and the deadlines of all that are live."""

import heapq
from collections.abc import Callable, Iterable, Iterator

from .request import Request

PRIORITY_SECONDS = 3600.0  # of waiting that one step of priority outweighs


class RequestQueue:
    """Who waits, by rank; and whose deadline passes next, be they waiting or running.

    Two heaps, from which requests that have left are taken when they come up. It alone gives ranks.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}  # who waits
        self._heap: list[tuple[tuple[float, int], Request]] = []  # all of them, and some that have left
        self._deadlines: list[tuple[float, int, Request]] = []  # of live requests, and some that have ended
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def add(self, request: Request, now: float) -> None:
        """Queue a request that has just come: an hour of waiting makes up for a step of priority."""
        arrival = self._num_arrivals
        request.arrive(arrival, (now + request.priority * PRIORITY_SECONDS, arrival), now)
        self._num_arrivals += 1
        self.restore(request)

    def restore(self, request: Request) -> None:
        """Queue a live request at the place of its rank, and watch its deadline, after clear()."""
        self.append(request)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))

    def append(self, request: Request) -> None:
        """A request that came before waits again, at the place of its rank."""
        heapq.heappush(self._heap, (request.rank, request))
        self._requests[request.request_id] = request

    def first(self) -> Request:
        """The one that ranks first; there must be one."""
        while (first := self._heap[0][1]) not in self:
            heapq.heappop(self._heap)
        return first

    def discard(self, request: Request) -> None:
        """Take a request out, if it waits."""
        self._requests.pop(request.request_id, None)
        if len(self._heap) > 2 * len(self._requests) + 16:
            self._heap = [(waiting.rank, waiting) for waiting in self._requests.values()]
            heapq.heapify(self._heap)

    def expired(self, clock: Callable[[], float], num_live: int) -> list[Request]:
        """Live requests whose deadline has passed, which are no longer watched.

        num_live: how many are live; once most of those watched have ended, they are dropped.
        """
        if not self._deadlines:
            return []
        if len(self._deadlines) > 2 * num_live + 16:
            self._deadlines = [item for item in self._deadlines if item[2].finish_reason is None]
            heapq.heapify(self._deadlines)
        return [request for request in self._pop_until(clock()) if request.finish_reason is None]

    def clear(self) -> None:
        """Nobody waits, and nobody's deadline is watched."""
        self._requests.clear()
        self._heap.clear()
        self._deadlines.clear()

    def check(self) -> None:
        """Everybody who waits comes up at the place of its rank; for tests."""
        waiting = {id(request) for _, request in self._heap if request in self}
        assert waiting == {*map(id, self._requests.values())}, "someone will never come up"
        assert all(rank == request.rank for rank, request in self._heap), "a rank has changed"

    def _pop_until(self, now: float) -> Iterable[Request]:
        """Those watched whose deadline has passed, and those before them that have ended."""
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].finish_reason):
            yield heapq.heappop(self._deadlines)[2]
