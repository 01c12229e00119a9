"""The process of a core: it connects to its parent, loads, steps what it is sent, and ends with it.

Run by engine.core_process as `python -c … FOLDER PARENT`. Nothing heavy is imported before it is connected.
"""

import ctypes
import faulthandler
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from ..common import garbage
from ..common.errors import ConfigError, EngineError, LaminaError, shown
from ..common.logging import get_logger
from .engine.core_socket import COMMANDS, HEARTBEAT_SECONDS, OUTPUTS, address
from .protocol import wire
from .protocol.core_messages import Command, CoreStatus
from .protocol.process_messages import CoreLost, FolderFound, LoadProgress, Start

if TYPE_CHECKING:
    from .engine.core_loop import CoreLoop

SECONDS_TO_CONNECT = 60.0
SECONDS_TO_SEND = 5.0  # of what is not sent yet at the end
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
LOADING = CoreStatus(is_alive=False, reason="it is being loaded")


def main() -> None:
    """Runs until it is asked to end, or the process that started it is gone; exits with 1 where it failed."""
    folder, parent = sys.argv[1], int(sys.argv[2])
    faulthandler.enable()
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupt, signal.SIG_IGN)  # they are for the process that serves, which ends this one
    watch = _Watch(parent, folder)
    line = _Line(folder)
    start = line.connect()
    shutil.rmtree(folder, ignore_errors=True)  # both ends have the sockets: nobody is to find them any more
    _end_with(parent)
    watch.beat = line.beat
    _log_to_stderr(start.log_level)
    is_lost = _serve(line, start)
    line.close()
    sys.exit(1 if is_lost else 0)


def _serve(line: "_Line", start: Start) -> bool:
    """Whether it ended by an error, which was sent then."""
    try:
        _load_and_run(line, start)
    except LaminaError as error:
        line.send(CoreLost(error=error))
    except BaseException as error:  # whatever it is, whoever waits is to hear of it
        get_logger("runtime").critical("the engine's core is lost: %s", shown(error), exc_info=error)
        line.send(CoreLost(error=EngineError(f"{type(error).__name__}: {shown(error, 500)}")))
    else:
        return False
    return True


def _load_and_run(line: "_Line", start: Start) -> None:
    model, settings = _settings(start)
    from .core_service import open_core  # with torch

    service, _ = open_core(model, settings, line.report, line.report_folder)
    from .engine.core_loop import CoreLoop

    line.loop = loop = CoreLoop(service, line.take, line.send)
    description = service.description
    del service
    garbage.freeze()  # what lives as long as the process is looked at by no collection
    line.send(description)
    loop.run()


def _settings(start: Start) -> tuple[Any, dict[str, Any]]:
    """The model and its settings. ConfigError where they hold what this process does not know."""
    try:
        model, settings = pickle.loads(start.settings)
    except Exception as error:
        raise ConfigError(
            f"a setting cannot be read in the engine's process: {shown(error, 300)}; define what it is made "
            'of in a module that both can import, or use engine="thread"'
        ) from error
    return model, settings


def _log_to_stderr(level: int) -> None:
    """Logs go where those of the parent go by default, and say whose they are."""
    handler, root = logging.StreamHandler(), logging.getLogger("lamina")
    handler.setFormatter(logging.Formatter("lamina engine: %(message)s"))
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_NAME, b"lamina-engine")
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


class _Watch(threading.Thread):
    """Sends heartbeats from a thread of its own, and ends the process where its parent has gone."""

    def __init__(self, parent: int, folder: str) -> None:
        super().__init__(name="lamina-heartbeat", daemon=True)
        self.beat: Callable[[], None] = _no_beat
        self._parent, self._folder = parent, folder
        self.start()

    def run(self) -> None:
        while os.getppid() == self._parent:
            self.beat()
            time.sleep(HEARTBEAT_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # and compilers that it may have started


def _no_beat() -> None:
    """Before there is anybody to hear it."""


class _Line:
    """Both ways between this process and its parent. Commands are the main thread's; any thread may send."""

    def __init__(self, folder: str) -> None:
        self.loop: CoreLoop | None = None
        self._context = zmq.Context(io_threads=1)
        self._lock = threading.Lock()
        self._commands = self._context.socket(zmq.PULL)
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.immediate = True  # nothing is queued before it is connected
        for socket in (self._commands, self._outputs):
            socket.set_hwm(0)
        self._commands.bind(address(folder, COMMANDS))
        self._outputs.connect(address(folder, OUTPUTS))

    def connect(self) -> Start:
        """Returns what the parent says first, once both ways are open."""
        milliseconds = int(1000 * SECONDS_TO_CONNECT)
        if not (self._commands.poll(milliseconds) and self._outputs.poll(milliseconds, zmq.POLLOUT)):
            raise EngineError(f"nobody answered within {SECONDS_TO_CONNECT:g} s")
        start = wire.decode(self._commands.recv())
        assert isinstance(start, Start), start
        return start

    def take(self, seconds: float | None) -> Sequence[Command]:
        """See CoreLoop."""
        commands = []
        if seconds != 0 and self._commands.poll(None if seconds is None else int(1000 * seconds)):
            commands.append(wire.decode(self._commands.recv()))
        while int(self._commands.events) & zmq.POLLIN:
            commands.append(wire.decode(self._commands.recv()))
        return commands

    def send(self, message: Any) -> None:
        """Sends a message, in order; never waits."""
        frame = wire.encode(message)
        with self._lock:
            if not self._outputs.closed:
                self._outputs.send(frame)

    def report(self, stage: str, fraction: float, detail: str) -> None:
        """The Progress of loading."""
        self.send(LoadProgress(stage=stage, fraction=fraction, detail=detail))

    def report_folder(self, folder: os.PathLike[str]) -> None:
        """Where the checkpoint lies, as soon as that is known."""
        self.send(FolderFound(folder=os.fspath(folder)))

    def beat(self) -> None:
        """Sends how the loop is doing."""
        loop = self.loop
        self.send(LOADING if loop is None else loop.status())

    def close(self) -> None:
        """Waits until what was sent has been taken."""
        with self._lock:
            self._outputs.close(int(1000 * SECONDS_TO_SEND))
        self._commands.close(0)
        self._context.term()
