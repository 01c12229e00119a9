"""Requests that wait: in order of rank, and those that must not wait longer than they said."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from .request import Request


class WaitingQueue:
    """Requests of one priority wait in order of rank, so the first of all is the first of some priority."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[str, Request]] = {}

    def __len__(self) -> int:
        """Counted anew, as an interrupt may come between a queue and a number beside it."""
        return sum(map(len, self._by_priority.values()))

    def __iter__(self) -> Iterator[Request]:
        for queue in self._by_priority.values():
            yield from queue.values()

    def append(self, request: Request) -> None:
        """A request that ranks after all others of its priority."""
        self._by_priority.setdefault(request.priority, OrderedDict())[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """A request that was let in and is to be let in again: as a rule it ranks before all that wait."""
        self.append(request)
        queue = self._by_priority[request.priority]
        queue.move_to_end(request.request_id, last=False)
        if next(islice(queue.values(), 1, None), request).rank < request.rank:
            self._by_priority[request.priority] = OrderedDict(
                sorted(queue.items(), key=lambda item: item[1].rank)
            )

    def first(self) -> Request:
        """The one that ranks first; there must be one."""
        heads = (next(iter(queue.values())) for queue in self._by_priority.values())
        return min(heads, key=lambda request: request.rank)

    def discard(self, request: Request) -> None:
        """Take a request out, if it waits."""
        queue = self._by_priority.get(request.priority)
        if queue is not None and queue.pop(request.request_id, None) is not None and not queue:
            del self._by_priority[request.priority]

    def clear(self) -> None:
        """Nobody waits."""
        self._by_priority.clear()

    def check(self) -> None:
        """Every queue is in order of rank; for tests."""
        for queue in self._by_priority.values():
            ranks = [request.rank for request in queue.values()]
            assert ranks == sorted(ranks), "someone overtook"


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
