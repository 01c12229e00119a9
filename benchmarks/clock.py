"""What a measurement costs: wall time, and processor time beside it."""

import time
from typing import NamedTuple


class Spent(NamedTuple):
    """Seconds that passed, and seconds of processor time that all threads of this process used meanwhile."""

    wall: float
    cpu: float


class Clock:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._started = Spent(time.perf_counter(), time.process_time())

    def spent(self) -> Spent:
        return Spent(time.perf_counter() - self._started.wall, time.process_time() - self._started.cpu)
