"""An engine in a thread that takes every command, and computes only the steps that a test lets through."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

LIMIT = 120.0  # seconds for what is sure to come, on a machine that has much else to do


def comes_true(condition: Callable[[], object], seconds: float = LIMIT) -> bool:
    """Whether a condition that must come true does; looked at every few milliseconds."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


class EngineGate:
    """A shut gate before the scheduler of an engine's core: it plans no step until the test lets it.

    Commands are taken meanwhile, as between any two steps: requests are queued and aborted, their time
    passes, and calls are answered. Steps that were launched before are read.
    """

    def __init__(self, core: Any) -> None:
        self._core, self._plan = core, core.scheduler.schedule
        self._clock: Callable[[], float] = core.scheduler._clock
        self._moved = threading.Condition()
        self._num_let = self._num_visits = 0
        self.num_steps = 0  # that were planned since it was shut
        with self._moved:
            core.scheduler.schedule = self._schedule

    @classmethod
    def of(cls, runtime: Any) -> Self:
        """Returns the gate of an AsyncRuntime whose engine is a thread; shut, until open()."""
        return cls(runtime._client._handle._worker._loop._core)

    def let(self, num_steps: int = 1) -> None:
        """Lets so many steps through, after all that was asked of the engine before; returns once planned."""
        with self._moved:
            began = self._num_visits + 2  # the next may come of a turn whose commands were taken already
            is_waited_for = self._moved.wait_for(lambda: self._num_visits >= began, LIMIT)
            self._num_let += num_steps
            is_done = self._moved.wait_for(lambda: not self._num_let, LIMIT if is_waited_for else 0)
        assert is_done, "there is nothing to compute"

    def wait_for(self, num_live: int) -> None:
        """Returns once the engine has so many requests, that wait or run."""
        assert comes_true(lambda: self.num_live == num_live), f"{self.num_live} live, wanted {num_live}"

    def begin(self, num_live: int) -> None:
        """Lets one step through once there are so many requests: each with room gets its first token."""
        self.wait_for(num_live)
        self.let(1)

    @property
    def num_live(self) -> int:
        """Requests that the engine has, each answer of several as one."""
        return len(self._core._live)

    def pass_time(self, seconds: float) -> None:
        """Has the scheduler's clock, by which deadlines pass, stand so much later until it is opened."""
        self._core.scheduler._clock = lambda: self._clock() + seconds

    def open(self) -> None:
        """Lets everything through from now on; twice is once."""
        with self._moved:
            vars(self._core.scheduler).pop("schedule", None)  # the class's own again
            self._core.scheduler._clock = self._clock
            self._num_let = 1 << 60
            self._moved.notify_all()

    def _schedule(self) -> Any:
        with self._moved:
            self._num_visits += 1
            self._moved.notify_all()
            if not self._num_let:
                self._moved.wait(0.002)  # then commands have their turn
            if not self._num_let:
                return None
            plan = self._plan()
            if plan is not None:
                self._num_let -= 1
                self.num_steps += 1
                self._moved.notify_all()
            return plan


@contextmanager
def held(runtime: Any) -> Iterator[EngineGate]:
    """The gate of an AsyncRuntime whose engine is a thread, shut until the block is left."""
    gate = EngineGate.of(runtime)
    try:
        yield gate
    finally:
        gate.open()
