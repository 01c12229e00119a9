"""A core in a process of its own: whatever ends it there is an error here, and no GIL is shared.

The process is spawned, in a session of its own. A pair of sockets joins the two, which has no name in any
folder: whatever ends either leaves no file.
"""

import atexit
import logging
import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from ...common.errors import ClosedError, ConfigError, EngineDeadError, shown
from ...common.logging import get_logger
from ...common.progress import Progress
from ..child_process import ChildProcess
from ..protocol import wire
from ..protocol.core_description import CoreDescription
from ..protocol.core_messages import Command, CoreStatus, Reply, Shutdown, StepOutputs
from ..protocol.process_messages import CoreLost, FolderFound, LoadProgress, Start
from ..tokenization.tokenizer import Tokenizer, load_tokenizer
from .core_handle import OpenedCore, Receiver
from .core_socket import CoreSocket

logger = get_logger("runtime")
SILENT_SECONDS = 4.0  # without a heartbeat, after which the process counts as hanging
SILENT_BUILDING_SECONDS = 30.0  # likewise while something is built, by code that may not let others run
SECONDS_TO_DIE = 5.0
SECONDS_AT_EXIT = 10.0
LOADING = CoreStatus(is_alive=False, reason="it is being loaded")
_running: "set[_Child]" = set()  # to be ended before the interpreter is


class ProcessCore:
    """A core that a process loads, steps and closes; see CoreHandle. Dropped without close(), it ends."""

    takes_objects = False

    def __init__(
        self,
        model: str | Path,
        settings: Mapping[str, Any],
        progress: Progress,
        *,
        environment: Mapping[str, str] | None = None,
        has_tokenizer: bool = True,
    ) -> None:
        """settings: the fields of RuntimeConfig, which have to pickle. progress: called in another thread.

        environment: the process's variables, in place of this one's. has_tokenizer: whether `opened` has one.
        ConfigError for settings that do not pickle.
        """
        override = settings.get("tokenizer")
        read_tokenizer = partial(load_tokenizer, override=override) if has_tokenizer else _no_tokenizer
        self._child = _Child(_pickled(model, settings), read_tokenizer, progress, environment)
        self.drop = self._child.drop
        weakref.finalize(self, self.drop).atexit = False

    @property
    def pid(self) -> int | None:
        """The process's id, None before it runs."""
        return self._child.pid

    @property
    def opened(self) -> Future[OpenedCore]:
        """See CoreHandle."""
        return self._child.opened

    def start(self, receive: Receiver) -> None:
        """See CoreHandle."""
        self._child.start(receive)

    def send(self, command: Command) -> None:
        """See CoreHandle. WireError for what is no plain data, UnsupportedError for logits processors."""
        self._child.send(command)

    def status(self) -> CoreStatus:
        """See CoreHandle. A process that says nothing for SILENT_SECONDS cannot step: that is a reason."""
        return self._child.status()

    def close(self, timeout: float = 10.0) -> None:
        """See CoreHandle."""
        self._child.end(timeout)


class _Child:
    """The process as its two threads know it, which know nothing of the handle, so that it can be dropped.

    One starts it and waits for its end, as ChildProcess says. The other reads what it sends.
    """

    def __init__(
        self,
        settings: bytes,
        read_tokenizer: Callable[[Path], Tokenizer | None],
        progress: Progress,
        environment: Mapping[str, str] | None,
    ) -> None:
        self.opened: Future[OpenedCore] = Future()
        self.opened.set_running_or_notify_cancel()
        self._read_tokenizer, self._progress = read_tokenizer, progress
        self._parent = os.getpid()
        own, self._theirs = socket.socketpair()
        self._socket = CoreSocket(own)
        self._lock = threading.Lock()  # of whether the process is gone
        self._is_closing = False
        self._receive: Receiver | None = None
        self._reason: str | None = None  # why it is not alive
        self._heard: tuple[CoreStatus, float] = LOADING, time.monotonic()
        self._tokenizer: Tokenizer | None = None
        self._failure: Exception | None = None  # what it, or who follows it, did not survive
        self._ending = "it did not end"
        fd = self._theirs.fileno()
        self._process = ChildProcess(
            "core_main", [str(fd)], self._tell_end, pass_fds=[fd], environment=environment
        )
        self._reader = threading.Thread(target=self._read, name="lamina-core-reader", daemon=True)
        _running.add(self)
        self._reader.start()
        self._process.start()
        self.send(Start(settings=settings, log_level=logging.getLogger("lamina").getEffectiveLevel()))

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self, receive: Receiver) -> None:
        with self._lock:
            self._receive = receive
            is_gone = self._reason is not None
        if is_gone:
            threading.Thread(target=receive, args=(None,), name="lamina-core-gone", daemon=True).start()

    def send(self, command: Command | Start) -> None:
        self._socket.send(wire.encode(command))

    def status(self) -> CoreStatus:
        if self._reason is not None:
            return CoreStatus(is_alive=False, reason=self._reason)
        heard, then = self._heard
        silence, step_seconds = time.monotonic() - then, heard.step_seconds
        reason = heard.reason
        if heard.is_alive and silence > (SILENT_BUILDING_SECONDS if heard.building else SILENT_SECONDS):
            reason = f"its process {self.pid} has said nothing for {silence:.1f} s: it is stopped, or hangs"
        return CoreStatus(
            is_alive=heard.is_alive,
            reason=reason,
            num_steps=heard.num_steps,
            step_seconds=None if step_seconds is None else step_seconds + silence,
            building=heard.building,
            is_asleep=heard.is_asleep,
        )

    def end(self, timeout: float) -> None:
        if os.getpid() != self._parent:
            return
        self._is_closing = True
        if self.opened.done():
            self.send(Shutdown())
            self._process.join(timeout)
        if self._process.is_alive:
            self.kill()
            self._process.join(SECONDS_TO_DIE)
        self._reader.join(SECONDS_TO_DIE)

    def drop(self) -> None:
        """End it, as nobody can ask it for anything any more; may be called at any line of any thread."""
        self._is_closing = True
        self.kill()

    def kill(self) -> None:
        """End it by force, with whatever it has started; may be called at any line of any thread."""
        self._process.kill()

    def _tell_end(self, reason: str) -> None:
        """Have the reader read what is left: the process is no more."""
        self._ending = reason
        self._socket.end_receiving()

    def _read(self) -> None:
        """Read what the process sends, until it is no more and all has been read."""
        self._process.wait_until_spawned()
        self._theirs.close()
        while (frame := self._next_frame()) is not None:
            try:
                self._take(wire.decode(frame))
            except Exception as error:  # a frame that is damaged, a progress that raises, no tokenizer
                self._fail(error)
        self._lose()

    def _next_frame(self) -> bytes | None:
        """The next frame, None once the process has closed its end."""
        try:
            return self._socket.receive(None)
        except EOFError:
            return None

    def _take(self, message: Any) -> None:
        match message:
            case StepOutputs() | Reply():
                if self._receive is not None:
                    self._receive(message)
            case CoreStatus():
                self._heard = message, time.monotonic()
            case LoadProgress():
                self._progress(message.stage, message.fraction, message.detail)
            case FolderFound():
                self._tokenizer = self._read_tokenizer(Path(message.folder))
            case CoreDescription() if self._failure is None:
                self._heard = CoreStatus(is_alive=True), time.monotonic()
                self.opened.set_result(OpenedCore(description=message, tokenizer=self._tokenizer))
            case CoreLost():
                self._failure = self._failure or message.error
                self._kill_later()

    def _fail(self, error: Exception) -> None:
        """End it, as it cannot be followed any more."""
        self._failure = self._failure or error
        self.kill()

    def _kill_later(self) -> None:
        """It ends by itself, unless what it does not survive keeps it from that, too."""
        timer = threading.Timer(SECONDS_TO_DIE, self.kill)
        timer.daemon = True
        timer.start()

    def _lose(self) -> None:
        """It is no more: give back what it took, and tell whoever waits."""
        self._process.join()
        with self._lock:
            self._reason = "it was closed" if self._is_closing else self._why()
            receive = self._receive
        self._socket.close()
        _running.discard(self)
        if not self.opened.done():
            self.opened.set_exception(self._load_error())
        elif not self._is_closing:
            logger.critical("the engine's core is lost: %s", self._reason)
        if receive is not None:
            receive(None)

    def _why(self) -> str:
        return self._ending if self._failure is None else str(self._failure)

    def _load_error(self) -> Exception:
        if self._is_closing:
            return ClosedError("this runtime was closed while it was being loaded")
        return self._failure or EngineDeadError(f"the engine could not be loaded: {self._ending}")


def _no_tokenizer(folder: Path) -> None:
    """Of an engine whose requests are written elsewhere."""


def _pickled(model: str | Path, settings: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps((model, dict(settings)))
    except Exception as error:  # somebody else's object: anything may come out of it
        raise ConfigError(
            f'a setting cannot be sent to the engine\'s process: {shown(error, 300)}; use engine="thread"'
        ) from error


@atexit.register
def _end_all() -> None:
    """End every process before the interpreter, so that each gives back what it has."""
    for child in [*_running]:
        child.end(SECONDS_AT_EXIT)
