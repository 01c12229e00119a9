"""What a measurement costs: wall time, and processor time beside it."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Spent(NamedTuple):
    """Seconds that passed, and seconds of processor time that all threads of this process used meanwhile."""

    wall: float
    cpu: float
    steps: tuple[float, ...] = ()  # seconds of each step, where several were made


class Clock:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._started = Spent(time.perf_counter(), time.process_time())

    def spent(self) -> Spent:
        return Spent(time.perf_counter() - self._started.wall, time.process_time() - self._started.cpu)

    @staticmethod
    def between(marks: Sequence[Spent]) -> Spent:
        """From the first of several marks to the last, with the steps between them."""
        walls = [mark.wall for mark in marks]
        steps = tuple(later - earlier for earlier, later in pairwise(walls))
        return Spent(walls[-1] - walls[0], marks[-1].cpu - marks[0].cpu, steps)
