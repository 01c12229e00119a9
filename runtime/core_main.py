"""The process of a core: it hears from its parent what to load, steps what it is sent, and ends with it.

Run by engine.core_process as `python -c … PARENT SOCKET`. Nothing heavy is imported before the command
to load has come.
"""

import faulthandler
import os
import pickle
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..common import garbage
from ..common.errors import ConfigError, EngineError, LaminaError, shown
from ..common.logging import get_logger
from .child_process import ParentWatch, end_with, leave_signals_to_parent, log_to_stderr
from .engine.core_socket import HEARTBEAT_SECONDS, CoreSocket
from .protocol import wire
from .protocol.core_messages import Command, CoreStatus, Shutdown
from .protocol.process_messages import CoreLost, FolderFound, LoadProgress, Start

if TYPE_CHECKING:
    from .engine.core_loop import CoreLoop

SECONDS_TO_START = 60.0  # until the command to load has come
SECONDS_TO_SEND = 5.0  # of what is not sent yet at the end
LOADING = CoreStatus(is_alive=False, reason="it is being loaded")


def main() -> None:
    """Runs until it is asked to end, or the process that started it is gone; exits with 1 where it failed."""
    parent, fd = int(sys.argv[1]), int(sys.argv[2])
    faulthandler.enable()
    leave_signals_to_parent()
    watch = ParentWatch(parent, HEARTBEAT_SECONDS)
    watch.start()
    line = _Line(CoreSocket(socket.socket(fileno=fd)))
    start = line.start()
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

    def __init__(self, connection: CoreSocket) -> None:
        self.loop: CoreLoop | None = None
        self._connection = connection

    def start(self) -> Start:
        """Returns what the parent says first."""
        frame = self._connection.receive(SECONDS_TO_START)
        if frame is None:
            raise EngineError(f"nothing was said within {SECONDS_TO_START:g} s")
        start = wire.decode(frame)
        assert isinstance(start, Start), start
        return start

    def take(self, seconds: float | None) -> Sequence[Command]:
        """See CoreLoop; the end of the parent is that of the loop."""
        commands: list[Command] = []
        try:
            while (frame := self._connection.receive(0.0 if commands else seconds)) is not None:
                commands.append(wire.decode(frame))
        except EOFError:
            commands.append(Shutdown())
        return commands

    def send(self, message: Any) -> None:
        """Sends a message, in order; never waits."""
        self._connection.send(wire.encode(message))

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
        self._connection.flush(SECONDS_TO_SEND)
        self._connection.close()
