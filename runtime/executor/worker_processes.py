"""Workers in processes of their own, as the executor reaches them: rings of commands and of answers.

A socket joins this process with each worker. A byte on it wakes who sleeps, as a ring is worth looking at.
Its end says that the process there is no more, whatever ended it. Nothing of this has a name in any folder.
"""

import atexit
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...common.errors import EngineDeadError, shown
from ...common.logging import get_logger
from ..child_process import ChildProcess
from ..protocol import wire
from ..protocol.core_messages import Shutdown
from ..protocol.process_messages import CoreLost
from .shared_ring import SharedRing, nameless_file
from .workers import BEAT_SECONDS, SECONDS_TO_END, Receive, lost_workers

logger = get_logger("runtime")
SECONDS_SILENT = 30.0  # without a heartbeat, after which a worker counts as lost
SECONDS_SILENT_BUILDING = 180.0  # likewise while it builds, by code that may not let other threads run
SECONDS_TO_DIE = 5.0
SECONDS_FOR_REASON = 2.0  # of a process whose socket has closed, to be waited for
FULL_RING_SECONDS = 0.001
_running: "set[WorkerProcesses]" = set()  # to be ended before the interpreter is


class _Link:
    """One worker: its process, its ring of answers, and this end of its socket."""

    def __init__(
        self,
        rank: int,
        num_workers: int,
        commands_fd: int,
        meeting_fd: int,
        environment: Mapping[str, str] | None,
    ) -> None:
        self.rank, self._ending = rank, "it did not end"
        self.last_words: Exception | None = None  # why it ended, if it said so
        answers_fd = SharedRing.new_memory(1)
        self.bell, theirs = socket.socketpair()
        try:
            self.answers = SharedRing(answers_fd, 1, reader=0)
            fds = commands_fd, answers_fd, theirs.fileno(), meeting_fd
            arguments = [str(number) for number in (rank, num_workers, *fds)]
            options: Any = {"pass_fds": fds, "environment": environment}
            self.process = ChildProcess("worker_main", arguments, self._note_end, **options)
            self._fds = answers_fd, theirs
        except BaseException:
            os.close(answers_fd)
            theirs.close()
            raise
        self.bell.setblocking(False)

    def close_passed(self) -> None:
        """Close here what the process has inherited, once it has."""
        os.close(self._fds[0])
        self._fds[1].close()

    def ring(self) -> None:
        """Wake the worker, unless it is to look already or is no more."""
        with suppress(BlockingIOError, BrokenPipeError, ConnectionError):
            self.bell.send(b"\0")

    def hush(self) -> bool:
        """Take what the worker has rung; False where it is no more."""
        try:
            return bool(self.bell.recv(4096))
        except BlockingIOError:
            return True
        except ConnectionError:
            return False

    def close(self) -> None:
        self.bell.close()
        with suppress(BufferError):  # an answer that somebody was interrupted at
            self.answers.close()

    @property
    def why(self) -> str:
        """How it ended, and what it said of that."""
        return self._ending + (f": {shown(self.last_words, 300)}" if self.last_words else "")

    def _note_end(self, reason: str) -> None:
        self._ending = reason


class WorkerProcesses:
    """Spawned workers, all of which get every message, in order. One thread at a time may call it.

    Once one of them is lost, all are ended, and whatever is called raises why.
    """

    def __init__(
        self,
        num_workers: int,
        receive: Receive,
        *,
        environments: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        """receive: called by whoever waits; environments: of each process, in place of that of this one."""
        self.lost: EngineDeadError | None = None
        self._receive, self._parent = receive, os.getpid()
        commands_fd, meeting_fd = SharedRing.new_memory(num_workers), nameless_file()
        try:
            self._commands = SharedRing(commands_fd, num_workers)
            own: Sequence[Any] = environments or [None] * num_workers
            fds = commands_fd, meeting_fd
            self._links = [_Link(rank, num_workers, *fds, own[rank]) for rank in range(num_workers)]
            _running.add(self)
            for link in self._links:
                link.process.start()
            for link in self._links:
                link.process.wait_until_spawned()
                link.close_passed()
        finally:
            os.close(commands_fd)
            os.close(meeting_fd)
        self._poll = select.poll()
        for link in self._links:
            self._poll.register(link.bell, select.POLLIN)

    @property
    def num_workers(self) -> int:
        """How many there are, one a rank."""
        return len(self._links)

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The ids of their processes, by rank."""
        return tuple(link.process.pid for link in self._links)

    def send(self, message: Any) -> None:
        """Hand a message to every worker. EngineDeadError where one is lost, WireError for no plain data."""
        self.check()
        frame = wire.encode(message)
        while not self._commands.write(frame):  # they are far behind
            self._look_around(FULL_RING_SECONDS)
            self.check()
        for rank in self._commands.waiting_readers():
            self._links[rank].ring()

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Receive messages until it is done. EngineDeadError where a worker is lost."""
        while not is_done():
            if not self._take_answers():
                self.check()
                self._sleep()

    def check(self) -> None:
        """EngineDeadError where a worker is lost, as far as that is known."""
        if self.lost is not None:
            raise self.lost

    def look(self) -> None:
        """The same, after a look at what has happened meanwhile."""
        self._look_around(0)
        self.check()

    def lose(self, why: str) -> None:
        """End all of them by force, since they cannot go on together."""
        if self.lost is None:
            self.lost = lost_workers(why)
            logger.critical("%s", self.lost)
        self.end(0)

    def kill(self) -> None:
        """End all of them by force; may be called at any line of any thread."""
        for link in self._links:
            link.process.kill()

    def end(self, timeout: float = SECONDS_TO_END) -> None:
        """Ask them to end, end by force those that have not after so many seconds, and give all back."""
        if os.getpid() != self._parent or self not in _running:
            return
        if timeout and self.lost is None and self._commands.write(wire.encode(Shutdown())):
            for link in self._links:
                link.ring()
            deadline = time.monotonic() + timeout
            for link in self._links:
                link.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        for link in self._links:
            link.process.join(SECONDS_TO_DIE)
        _running.discard(self)
        self._close()

    def _close(self) -> None:
        for link in self._links:
            self._poll.unregister(link.bell)
            link.close()
        with suppress(BufferError):
            self._commands.close()

    def _take_answers(self) -> bool:
        """Whether anything had been answered; all of it is received now."""
        is_any = False
        for link in self._links:
            while self.lost is None and (frame := link.answers.peek()) is not None:
                with frame:
                    message = wire.decode(frame)
                if isinstance(message, CoreLost):
                    link.last_words = message.error
                self._receive(link.rank, message)
                if self.lost is None:
                    link.answers.pass_by()
                is_any = True
        return is_any

    def _sleep(self) -> None:
        """Sleep until there is an answer, or a worker is no more; not for long."""
        rings = [link.answers for link in self._links]
        try:
            if all(ring.begin_wait() for ring in rings):
                self._look_around(BEAT_SECONDS)
        finally:
            if self.lost is None:
                for ring in rings:
                    ring.end_wait()

    def _look_around(self, seconds: float) -> None:
        """Sleep until a worker has rung, at most so long; see to those that are no more."""
        if self.lost is not None:
            return
        rung = {fd for fd, _ in self._poll.poll(1000 * seconds)}
        gone = [link for link in self._links if link.bell.fileno() in rung and not link.hush()]
        if gone:
            self._take_answers()  # it may have said why
            for link in gone:
                link.process.join(SECONDS_FOR_REASON)
            self.lose("; ".join(f"rank {link.rank}: {link.why}" for link in gone))
        elif not rung:
            self._look_for_silence()

    def _look_for_silence(self) -> None:
        now = time.monotonic_ns()
        for link in self._links:
            then, is_building = link.answers.last_beat
            most = SECONDS_SILENT_BUILDING if is_building or not then else SECONDS_SILENT
            if then and (now - then) / 1e9 > most:
                pid = link.process.pid
                why = f"its process {pid} has said nothing for {most:g} s: it is stopped, or hangs"
                self.lose(f"rank {link.rank}: {why}")
                return


@atexit.register
def _end_all() -> None:
    """End every process before the interpreter, so that each gives back what it has."""
    for processes in [*_running]:
        processes.end()
