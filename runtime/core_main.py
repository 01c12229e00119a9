"""The process of a core: it connects to its parent, loads, steps what it is sent, and ends with it.

Run by engine.core_process as `python -c … PARENT FOLDER`. Nothing heavy is imported before it is connected.
"""

import faulthandler
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from ..common import garbage
from ..common.errors import ConfigError, EngineError, LaminaError, shown
from ..common.logging import get_logger
from .child_process import ParentWatch, end_with, leave_signals_to_parent, log_to_stderr
from .engine.core_socket import COMMANDS, HEARTBEAT_SECONDS, OUTPUTS, address
from .protocol import wire
from .protocol.core_messages import Command, CoreStatus
from .protocol.process_messages import CoreLost, FolderFound, LoadProgress, Start

if TYPE_CHECKING:
    from .engine.core_loop import CoreLoop

SECONDS_TO_CONNECT = 60.0
SECONDS_TO_SEND = 5.0  # of what is not sent yet at the end
LOADING = CoreStatus(is_alive=False, reason="it is being loaded")


def main() -> None:
    """Runs until it is asked to end, or the process that started it is gone; exits with 1 where it failed."""
    parent, folder = int(sys.argv[1]), sys.argv[2]
    faulthandler.enable()
    leave_signals_to_parent()
    watch = ParentWatch(parent, HEARTBEAT_SECONDS)
    watch.before_end = partial(shutil.rmtree, folder, ignore_errors=True)
    watch.start()
    line = _Line(folder)
    start = line.connect()
    shutil.rmtree(folder, ignore_errors=True)  # both ends have the sockets: nobody is to find them any more
    end_with(parent, "lamina-engine")
    watch.beat = line.beat
    log_to_stderr(start.log_level, "lamina engine")
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
