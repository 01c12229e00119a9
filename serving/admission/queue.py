"""Who waits for a turn: by priority, and among the keys of one priority in turns."""

import bisect
from collections import defaultdict
from dataclasses import dataclass, field

Rank = tuple[int, float, int]


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One place in the queue, before those of a higher rank."""

    rank: Rank  # priority, turn, arrival
    owner: str = field(compare=False)
    size: int = field(compare=False)


@dataclass(slots=True)
class _Level:
    """The turns of one priority: each sequence takes one, and an owner's follow on each other."""

    now: float = 0.0  # the turn of who was served last
    after: dict[str, float] = field(default_factory=dict)  # each owner's next turn
    num_waiting: int = 0


class FairQueue:
    """Places in order: an owner who has queued much takes turns with one who comes later."""

    def __init__(self) -> None:
        self._places: list[Place] = []  # sorted
        self._levels: defaultdict[int, _Level] = defaultdict(_Level)
        self._owned: defaultdict[str, int] = defaultdict(int)
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._places)

    def num_of(self, owner: str) -> int:
        """Returns how many places one owner has."""
        return self._owned.get(owner, 0)

    def place(self, owner: str, priority: int, size: int) -> Place:
        """Returns the place that a request of so many sequences would get now, without taking it."""
        level = self._levels.get(priority) or _Level()
        turn = max(level.now, level.after.get(owner, 0.0)) + size
        return Place((priority, turn, self._arrivals), owner, size)

    def size_before(self, place: Place) -> int:
        """Returns the sequences that are served before this place."""
        return sum(other.size for other in self._places[: bisect.bisect_left(self._places, place)])

    def add(self, place: Place) -> None:
        """Takes a place that place() has just returned."""
        priority, turn, _ = place.rank
        bisect.insort(self._places, place)
        self._arrivals += 1
        self._owned[place.owner] += 1
        level = self._levels[priority]
        level.after[place.owner] = turn
        level.num_waiting += 1

    def remove(self, place: Place) -> None:
        """Gives a place up, which must be taken."""
        index = bisect.bisect_left(self._places, place)
        assert self._places[index] is place
        self._leave(index)
        if place.owner not in self._owned and (level := self._levels.get(place.rank[0])):
            level.after.pop(place.owner, None)  # who gave everything up stands as a newcomer

    def pop(self) -> Place:
        """Gives up and returns the first place; there must be one."""
        first = self._places[0]
        self._levels[first.rank[0]].now = first.rank[1] - first.size
        self._leave(0)
        return first

    def _leave(self, index: int) -> None:
        place = self._places.pop(index)
        self._owned[place.owner] -= 1
        if not self._owned[place.owner]:
            del self._owned[place.owner]
        level = self._levels[place.rank[0]]
        level.num_waiting -= 1
        if not level.num_waiting:  # nobody waits: all turns start anew
            del self._levels[place.rank[0]]
