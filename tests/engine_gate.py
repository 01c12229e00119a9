"""An engine in a thread that takes every command, and computes only the steps that a test lets through."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
        self._num_let = 0
        self.num_steps = 0  # that were planned since it was shut
        with self._moved:
            core.scheduler.schedule = self._schedule

    def let(self, num_steps: int = 1) -> None:
        """Lets so many steps through, and returns once the last of them is planned."""
        with self._moved:
            self._num_let += num_steps
            self._moved.notify_all()
            assert self._moved.wait_for(lambda: not self._num_let, LIMIT), "there is nothing to compute"

    def wait_for(self, num_live: int) -> None:
        """Returns once the engine has so many requests, that wait or run."""
        assert comes_true(lambda: self.num_live == num_live), f"{self.num_live} live, wanted {num_live}"

    @property
    def num_live(self) -> int:
        """Requests that the engine has, each answer of several as one."""
        return len(self._core._live)

    def pass_time(self, seconds: float) -> None:
        """Has the scheduler's clock, by which deadlines pass, stand so much later until it is opened."""
        self._core.scheduler._clock = lambda: self._clock() + seconds

    def open(self) -> None:
        """Lets everything through from now on."""
        with self._moved:
            del self._core.scheduler.schedule  # the class's own again
            self._core.scheduler._clock = self._clock
            self._num_let = 1 << 60
            self._moved.notify_all()

    def _schedule(self) -> Any:
        with self._moved:
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
    gate = EngineGate(runtime._client._handle._worker._loop._core)
    try:
        yield gate
    finally:
        gate.open()
