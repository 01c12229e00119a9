"""The actor of a rank on a Ray cluster: a worker in a thread of its own, and calls that bring it messages.

What an actor is sent and what it answers is numbered, so that to send again, or to ask again, changes nothing
and whoever calls may be interrupted at any line.
"""

import faulthandler
import fcntl
import os
import signal
import socket
import struct
import sys
import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

from ...common import env
from ..protocol import wire

PROGRAM = "lamina.runtime.worker_main"  # of workers, by its name: it lies above executors
NUM_CALLS = 4  # at once: one that asks, one that sends, and those that were interrupted
POLL_SECONDS = 5.0  # after which an actor answers that there is nothing to say
SECONDS_TO_MEET = 300.0
SIOCGIFADDR = 0x8915  # the system call of Linux for a network interface's address


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an actor runs, and where all ranks can meet if it is that of rank 0."""

    pid: int
    address: str  # of its node
    meeting: str
    version: str  # of Lamina there


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What a worker has said from a number on, and whether it has ended."""

    first: int
    frames: tuple[bytes, ...]
    has_ended: bool


class RankActor:
    """One rank. All its calls return soon but `answers`, which waits."""

    def __init__(self, rank: int, num_workers: int) -> None:
        os.dup2(2, 1)  # what it prints is a log, too
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        self._address: str = import_module("ray").util.get_node_ip_address()
        self._store: Any = None
        self._line = ActorLine(rank, num_workers)

    def place(self) -> Place:
        """Where it runs. Rank 0 holds the meeting, at a port that is free there."""
        meeting = ""
        if self._line.num_workers > 1:
            _talk_over(self._address)
            if self._line.rank == 0:
                meeting = self._open_meeting()
        return Place(pid=os.getpid(), address=self._address, meeting=meeting, version=version())

    def begin(self, meeting: str) -> None:
        """Start the worker, which meets the others there."""
        self._line.meeting = meeting
        threading.Thread(target=self._serve, name="lamina-worker", daemon=True).start()

    def take(self, number: int, frame: bytes) -> None:
        """Bring the worker a message, the number-th, in whatever order they come."""
        self._line.put(number, frame)

    def answers(self, first: int) -> Answers:
        """What the worker says from a number on, once there is anything, or nothing after a while.

        What stands before is forgotten: who asks has it.
        """
        return self._line.said_from(first)

    def _serve(self) -> None:
        try:
            import_module(PROGRAM).serve(self._line)
        finally:
            self._line.end()

    def _open_meeting(self) -> str:
        store: Any = import_module("torch.distributed").TCPStore
        host = f"[{self._address}]" if ":" in self._address else self._address
        # multi_tenant: the rank itself meets there, too, and finds the port taken by its own process
        self._store = store(
            self._address,
            0,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=SECONDS_TO_MEET),
        )
        return f"tcp://{host}:{self._store.port}"


class ActorLine:
    """The WorkerLine of an actor: messages by number, as calls bring them, and answers until they are had."""

    def __init__(self, rank: int, num_workers: int) -> None:
        self.rank, self.num_workers, self.meeting = rank, num_workers, ""
        self._changed = threading.Condition()
        self._brought: dict[int, bytes] = {}  # by number, until they are taken
        self._num_taken = 0
        self._said: deque[bytes] = deque()
        self._first = 0  # the number of the oldest of them
        self._num_asked = 0  # of calls for answers: the newest alone waits
        self._has_ended = False

    def put(self, number: int, frame: bytes) -> None:
        """Note a message; one that was brought before is none."""
        with self._changed:
            if number >= self._num_taken:
                self._brought[number] = frame
                self._changed.notify_all()

    def take(self, seconds: float | None) -> Any:
        """See WorkerLine."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_taken in self._brought, seconds):
                return None
            frame = self._brought.pop(self._num_taken)
            self._num_taken += 1
        return wire.decode(frame)

    def send(self, message: Any) -> None:
        """See WorkerLine."""
        frame = wire.encode(message)
        with self._changed:
            self._said.append(frame)
            self._changed.notify_all()

    def end(self) -> None:
        """The worker takes and says no more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def note_building(self, is_building: bool) -> None:
        """See WorkerLine; whoever asks is patient enough for every build."""

    def said_from(self, first: int) -> Answers:
        """What was said from a number on, waited for; what stands before is dropped."""
        with self._changed:
            self._num_asked += 1
            own = self._num_asked
            self._changed.notify_all()
            while self._first < first:
                self._said.popleft()
                self._first += 1
            self._changed.wait_for(
                lambda: bool(self._said) or self._has_ended or self._num_asked > own, POLL_SECONDS
            )
            return Answers(first=self._first, frames=tuple(self._said), has_ended=self._has_ended)


def version() -> str:
    """Lamina's version here, by its name: the top of the package lies above executors."""
    return str(import_module("lamina").__version__)


def _talk_over(address: str) -> None:
    """Have gloo talk over the interface that has a node's address, whatever its name resolves to."""
    if sys.platform == "linux" and (interface := interface_of(address)) is not None:
        env.gloo_over(interface)


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an IPv4 address; None where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
