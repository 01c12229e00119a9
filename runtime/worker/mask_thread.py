"""A thread beside the one that steps, for work that needs no interpreter's lock, as masks are computed."""

import statistics
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

SECONDS_TO_BEGIN = 0.001  # that a job is given to begin before its caller goes on
NUM_NOTED = 3  # times of each way that count
STEPS_BETWEEN_TRIES, MOST_STEPS_BETWEEN_TRIES = 64, 1024  # of the way that was the dearer one


class Job:
    """Work that is done once, by the thread, or by who waits for it where the thread has not begun.

    The work may be done again where an interrupt hit who waits: it is to come to the same.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._claims: list[str] = []  # the first has it; appending is atomic
        self._begun, self._done = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, unless who waits has begun; the thread's way."""
        is_own = self._is_first("thread")
        self._begun.set()
        if not is_own:
            return
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait_for_begin(self) -> None:
        """Let the thread have the interpreter's lock until it needs it no more, or seems to be kept."""
        self._begun.wait(SECONDS_TO_BEGIN)

    def wait(self) -> None:
        """Return once it is over."""
        if not self._done.is_set() and self._is_first("caller"):
            try:
                self._work()
            except Exception as error:
                self._error = error
            self._done.set()
        self._done.wait()

    def result(self) -> None:
        """Return once it is done; raises what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error

    def _is_first(self, who: str) -> bool:
        self._claims.append(who)
        return self._claims[0] == who


class CheaperWay:
    """Whether the thread costs its caller less than the work itself, by what either took of late.

    A core that sleeps may take as long to be woken as the work does. The dearer way is tried now and then,
    ever more rarely while it stays the dearer one. All work is to be of about one size: what it costs to
    wake a thread is the same for little and for much.
    """

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {way: deque(maxlen=NUM_NOTED) for way in (False, True)}
        self._last = False  # that was cheaper
        self._steps_to_try = self._interval = STEPS_BETWEEN_TRIES

    def is_thread(self) -> bool:
        """The way to take now."""
        for way, seconds in self._seconds.items():
            if len(seconds) < NUM_NOTED:
                return way
        cheaper = statistics.median(self._seconds[True]) < statistics.median(self._seconds[False])
        if cheaper != self._last:
            self._last, self._interval = cheaper, STEPS_BETWEEN_TRIES
            self._steps_to_try = self._interval
        self._steps_to_try -= 1
        if self._steps_to_try:
            return cheaper
        self._interval = min(2 * self._interval, MOST_STEPS_BETWEEN_TRIES)
        self._steps_to_try = self._interval
        return not cheaper

    def note(self, is_thread: bool, seconds: float) -> None:
        """Note what a piece of the work took of its caller's time that way."""
        self._seconds[is_thread].append(seconds)


class MaskThread:
    """Does jobs in their order; it begins with the first."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, job: Job) -> None:
        """Have a job done beside what the caller goes on to do."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs,), daemon=True, name="lamina-masks"
            )
            self._thread.start()
        self._jobs.put(job)
        job.wait_for_begin()

    def close(self) -> None:
        """End the thread, after the jobs that it has."""
        if self._thread is not None and self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # with what it holds, before the next one comes
