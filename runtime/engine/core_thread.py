"""A core in a thread of its own: what torch keeps for a thread is that thread's alone."""

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from ...common.errors import ClosedError, shown
from ...common.logging import get_logger
from ...common.progress import Progress
from ..protocol.core_messages import Command, CoreStatus, Message, Shutdown
from .core_handle import OpenedCore, Receiver

if TYPE_CHECKING:
    from .core_loop import CoreLoop, CoreService

logger = get_logger("runtime")
OpenCore: TypeAlias = "Callable[[Progress], tuple[CoreService, OpenedCore]]"
SECONDS_AT_EXIT = 10.0
_running: "set[_Worker]" = set()  # to be ended before the interpreter is


class ThreadCore:
    """A core that a thread loads, steps and closes; see CoreHandle. Dropped without close(), it ends too."""

    takes_objects = True

    def __init__(self, open_core: "OpenCore", progress: Progress) -> None:
        """open_core(progress): loads a core, in the new thread, which calls progress."""
        self._worker = _Worker(open_core, progress)
        weakref.finalize(self, self._worker.commands.put, Shutdown()).atexit = False
        self._worker.start()

    @property
    def opened(self) -> Future[OpenedCore]:
        """See CoreHandle."""
        return self._worker.opened

    def start(self, receive: Receiver) -> None:
        """See CoreHandle."""
        self._worker.receive = receive

    def send(self, command: Command) -> None:
        """See CoreHandle."""
        self._worker.commands.put(command)

    def status(self) -> CoreStatus:
        """See CoreHandle."""
        return self._worker.status()

    def close(self, timeout: float = 10.0) -> None:
        """See CoreHandle; a thread cannot be ended by force, so one that hangs is left behind and logged."""
        self._worker.end(timeout)


class _Worker(threading.Thread):
    """The thread, which knows nothing of the handle, so that the handle can be dropped."""

    def __init__(self, open_core: "OpenCore", progress: Progress) -> None:
        super().__init__(name="lamina-core", daemon=True)
        self.commands: SimpleQueue[Command] = SimpleQueue()
        self.opened: Future[OpenedCore] = Future()
        self.opened.set_running_or_notify_cancel()
        self.receive: Receiver = _receive_nothing
        self._open_core, self._progress = open_core, progress
        self._is_ending = False
        self._loop: CoreLoop | None = None
        self._reason: str | None = None  # why it is not alive

    def run(self) -> None:
        """Loads, serves until it is told to end, and says last that it is gone."""
        _running.add(self)
        try:
            self._serve()
        except BaseException as error:
            self._lose(error)
        finally:
            self._reason = self._reason or "it was closed"
            self._loop = None
            _running.discard(self)
            self.receive(None)

    def status(self) -> CoreStatus:
        loop = self._loop
        if self._reason is not None:
            return CoreStatus(is_alive=False, reason=self._reason)
        if loop is None:
            return CoreStatus(is_alive=False, reason="it is being loaded")
        return loop.status()

    def end(self, timeout: float) -> None:
        self._is_ending = True
        self.commands.put(Shutdown())
        self.join(timeout)
        if self.is_alive() and self._reason is None:
            self._reason = f"it did not end within {timeout} s of being asked to"
            logger.error("the engine's thread is left behind: %s", self._reason)
            self.receive(None)

    def _serve(self) -> None:
        from .core_loop import CoreLoop  # in this thread, as it imports torch for seconds

        open_core, self._open_core = self._open_core, _open_nothing
        service, opened = open_core(self._report)
        del open_core
        self._loop = CoreLoop(service, self._take, self._pass_on)
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # to run before what was registered meanwhile, as by torch
        self.opened.set_result(opened)
        del service, opened
        self._loop.run()

    def _lose(self, error: BaseException) -> None:
        if not self.opened.done():
            self._reason = "it could not be loaded"
            self.opened.set_exception(error)
            return
        self._reason = shown(error, 500)
        logger.critical("the engine's core is lost: %s", self._reason, exc_info=error)

    def _take(self, seconds: float | None) -> Sequence[Command]:
        taken: list[Command] = []
        if seconds != 0:
            with suppress(Empty):
                taken.append(self.commands.get(timeout=seconds))
        while not self.commands.empty():
            taken.append(self.commands.get())
        return taken

    def _pass_on(self, message: Message) -> None:
        self.receive(message)

    def _report(self, stage: str, fraction: float, detail: str) -> None:
        if self._is_ending:
            raise ClosedError("this runtime was closed while it was being loaded")
        self._progress(stage, fraction, detail)


def _receive_nothing(message: Message | None) -> None:
    """Before anybody has asked for anything."""


def _open_nothing(progress: Progress) -> "tuple[CoreService, OpenedCore]":
    raise AssertionError("a thread runs once")


@atexit.register
def _end_all() -> None:
    """Ends every core before the interpreter: a thread that computed on would meet torch half torn down."""
    for worker in [*_running]:
        if worker.is_alive():  # in a forked child none is
            worker.end(SECONDS_AT_EXIT)
