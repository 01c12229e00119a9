"""Requests that wait: in order of rank, and those that must not wait longer than they said."""

import heapq
from collections.abc import Iterator

from .request import Request


class WaitingQueue:
    """Requests in order of rank. A heap, from which those that have left are taken when they come up."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}  # who waits
        self._heap: list[tuple[tuple[float, int], Request]] = []  # all of them, and some that have left

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def append(self, request: Request) -> None:
        """A request waits, at the place of its rank."""
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

    def clear(self) -> None:
        """Nobody waits."""
        self._requests.clear()
        self._heap.clear()

    def check(self) -> None:
        """Everybody who waits comes up at the place of its rank; for tests."""
        waiting = {id(request) for _, request in self._heap if request in self}
        assert waiting == {*map(id, self._requests.values())}, "someone will never come up"
        assert all(rank == request.rank for rank, request in self._heap), "a rank has changed"


class Deadlines:
    """Live requests that have a deadline, the next one to pass first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.arrival, request))

    def passed(self, now: float) -> list[Request]:
        """Live requests whose deadline has passed; they are no longer watched."""
        found = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].finish_reason):
            request = heapq.heappop(self._heap)[2]
            if request.finish_reason is None:
                found.append(request)
        return found

    def forget_ended(self, num_live: int) -> None:
        """Drop requests that have ended, once they are most of those watched."""
        if len(self._heap) > 2 * num_live + 16:
            self._heap = [item for item in self._heap if item[2].finish_reason is None]
            heapq.heapify(self._heap)

    def clear(self) -> None:
        """Nobody is watched."""
        self._heap.clear()
