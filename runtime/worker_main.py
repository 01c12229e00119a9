"""The program of a worker, which loads its rank's part of a model and runs steps, and its process.

main() is run by executor.worker_processes as `python -c … PARENT RANK WORKERS COMMANDS ANSWERS BELL MEETING`,
the last four being file descriptors; serve() by executor.ray_actor in an actor. Nothing heavy is imported
before heartbeats are sent.
"""

import faulthandler
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Protocol

from ..common import garbage
from ..common.errors import ConfigError, LaminaError, shown
from ..common.logging import get_logger
from .child_process import ParentWatch, end_with, leave_signals_to_parent, log_to_stderr
from .executor.shared_ring import SharedRing
from .protocol import wire
from .protocol.core_messages import Shutdown
from .protocol.process_messages import CoreLost, LoadProgress
from .protocol.worker_messages import StartWorker

BEAT_SECONDS = 0.5
FULL_RING_SECONDS = 0.001


def main() -> None:
    """Runs until it is asked to end, or the process that started it is gone; exits with 1 where it failed."""
    parent, rank, num_workers, *fds = map(int, sys.argv[1:])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    leave_signals_to_parent()
    line = _Line(rank, num_workers, *fds)
    watch = ParentWatch(parent, BEAT_SECONDS)
    watch.beat = line.beat
    watch.start()
    end_with(parent, "lamina-worker")
    sys.exit(1 if serve(line) else 0)


class WorkerLine(Protocol):
    """Both ways between a worker and the executor. One thread takes, any may send."""

    rank: int
    num_workers: int
    meeting: str  # where ranks find each other; see GlooGroup

    def take(self, seconds: float | None) -> Any:
        """The next message; None where none comes within so many seconds, however long None waits."""

    def send(self, message: Any) -> None:
        """Say something, in order."""

    def note_building(self, is_building: bool) -> None:
        """Say whether something is built by code that may let no other thread run."""


def serve(line: WorkerLine) -> bool:
    """Load and run as the first message says; returns whether it ended by an error, which was sent then."""
    start = line.take(None)
    if isinstance(start, Shutdown):
        return False
    assert isinstance(start, StartWorker), start
    log_to_stderr(start.log_level, f"lamina worker {line.rank}")
    try:
        _load_and_run(line, start)
    except LaminaError as error:
        line.send(CoreLost(error=error))
    except BaseException as error:  # whatever it is, whoever waits is to hear of it
        from .executor.worker_loop import as_known

        _log_loss(line.rank, error)
        line.send(CoreLost(error=as_known(error)))
    else:
        return False
    return True


def _load_and_run(line: WorkerLine, start: StartWorker) -> None:
    config = _config(start)
    from .executor.worker_loop import WorkerLoop  # with torch
    from .startup.ranks import joined_ranks, open_rank

    def report(stage: str, fraction: float, detail: str) -> None:
        line.send(LoadProgress(stage=stage, fraction=fraction, detail=detail))

    rank, parallel = line.rank, config.parallel
    with joined_ranks(line.meeting, parallel, rank=rank, num_threads=start.num_threads):
        loaded = open_rank(config, report)
        garbage.freeze()  # what lives as long as the process is looked at by no collection
        late_builds = loaded.worker.late_builds

        def note_build(what: str) -> None:
            line.note_building(True)
            late_builds(what)

        line.note_building(False)
        line.send(loaded.ready)
        loop = WorkerLoop(
            loaded.worker.runner,
            loaded.facts,
            answers=rank == parallel.answering_rank,
            take=line.take,
            send=line.send,
            on_build=note_build,
        )
        try:
            loop.run()
        except LaminaError as error:  # which nobody has asked for, unlike those of loading
            _log_loss(rank, error)
            raise


def _log_loss(rank: int, error: BaseException) -> None:
    get_logger("runtime").critical("worker %d is lost: %s", rank, shown(error), exc_info=error)


def _config(start: StartWorker) -> Any:
    """The RuntimeConfig. ConfigError where it holds what this process does not know."""
    try:
        return pickle.loads(start.config)
    except Exception as error:
        raise ConfigError(
            f"a setting cannot be read in a worker's process: {shown(error, 300)}; define what it is made of "
            "in a module that both can import, or use executor='uniproc'"
        ) from error


class _Line:
    """The WorkerLine of a process whose parent it shares memory with."""

    def __init__(self, rank: int, num_workers: int, commands: int, answers: int, bell: int, meeting: int):
        self.rank, self.num_workers = rank, num_workers
        self.meeting = f"file:///proc/self/fd/{meeting}"  # a file that no folder has
        self._commands = SharedRing(commands, num_workers, reader=rank)
        self._answers = SharedRing(answers, 1)
        self._bell = socket.socket(fileno=bell)
        self._lock = threading.Lock()
        self._is_building = True  # it is being loaded
        for fd in (commands, answers):
            os.close(fd)

    def take(self, seconds: float | None) -> Any:
        """See WorkerLine."""
        self._is_building = False
        while (frame := self._commands.peek()) is None:
            if not self._sleep(seconds):
                return None
        with frame:
            message = wire.decode(frame)
        self._commands.pass_by()
        return message

    def _sleep(self, seconds: float | None) -> bool:
        """Sleep until there may be a message; False where none came within so many seconds."""
        try:
            if not self._commands.begin_wait():
                return True
            if seconds is not None and not select.select([self._bell], [], [], seconds)[0]:
                return False
            if not self._hush():  # who sends is no more
                os.killpg(os.getpgrp(), signal.SIGKILL)
            return True
        finally:
            self._commands.end_wait()

    def _hush(self) -> bool:
        """Take what has been rung, waiting for it; False where nobody can ring any more."""
        try:
            return bool(self._bell.recv(4096))
        except ConnectionError:
            return False

    def send(self, message: Any) -> None:
        """See WorkerLine; waits while nobody reads."""
        frame = wire.encode(message)
        with self._lock:
            while not self._answers.write(frame):
                time.sleep(FULL_RING_SECONDS)
            if self._answers.waiting_readers():
                with suppress(OSError):  # who reads is no more, which ends this process soon
                    self._bell.send(b"\0", socket.MSG_DONTWAIT)

    def beat(self) -> None:
        """Say that this process lives."""
        self._answers.beat(time.monotonic_ns(), self._is_building)

    def note_building(self, is_building: bool) -> None:
        """See WorkerLine."""
        self._is_building = is_building
        self.beat()
