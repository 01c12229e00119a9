"""The loop of a core that runs apart from who asks: take commands, step, send what came of it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ...common.errors import EngineDeadError, EngineError, LaminaError, RequestError, UnsupportedError, shown
from ...common.logging import get_logger
from ...compiler.torch_internals.torch_section import neutral
from ...custom_ops._shared.ledger import Watcher, watched
from ..protocol.core_description import CoreDescription
from ..protocol.core_messages import (
    AbortRequests,
    AddRequests,
    Call,
    Command,
    CoreStatus,
    Message,
    Reply,
    Shutdown,
    StepOutputs,
)
from ..protocol.engine_output import EngineOutput, Finish, Timeline
from ..protocol.engine_request import EngineRequest
from ..protocol.interrupts import InterruptAtRequestError
from .engine_core import EngineCore

logger = get_logger("runtime")
Take = Callable[[float | None], Sequence[Command]]
ASLEEP_SECONDS = 0.1  # between two looks at deadlines while the core sleeps


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreService:
    """A core with what a loop over it needs beside it."""

    core: EngineCore
    description: CoreDescription
    methods: Mapping[str, Callable[..., Any]]  # that a Call may name
    is_lazy: bool  # whether captures are left to moments in which there is nothing else to do
    on_build: Watcher  # called with what is built in the middle of a step; may raise
    check_device: Callable[[], None]  # raises where the device computes nothing any more
    give_back: Callable[[], None]  # what is held beside the core


class CoreLoop:
    """Steps a core while it has work, and waits for commands while it has none. One thread runs it.

    take(seconds) returns the commands that have come, in order, and waits so long for the first of them;
    None: until it comes. send() gets one message of outputs a step.

    An error of one request ends that request. What the core does not survive ends the loop: run() raises it.
    """

    def __init__(
        self,
        service: CoreService,
        take: Take,
        send: Callable[[Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service, self._core = service, service.core
        self._take, self._send, self._clock = take, send, clock
        self._methods: dict[str, Callable[..., Any]] = {
            **service.methods,
            "suspend": self._suspend,
            "resume": self._resume,
            "sleep": self._sleep,
            "wake": self._wake,
            "is_sleeping": lambda: self._core.is_asleep,
        }
        self._may_capture = True  # what is left to be captured, while nothing else is to be done
        self._is_ending = False
        self._num_steps = 0
        self._busy_since: float | None = None
        self._building: str | None = None

    def run(self) -> None:
        """Returns after a Shutdown, when every request has ended and everything is given back."""
        try:
            while not self._is_ending:
                with neutral():
                    self._turn()
            self._core.close()
            self._send_outputs()
        finally:
            self._give_back()

    def status(self) -> CoreStatus:
        """Returns what the loop is at; any thread may ask, and it never waits."""
        since = self._busy_since
        return CoreStatus(
            is_alive=True,
            num_steps=self._num_steps,
            step_seconds=None if since is None else max(0.0, self._clock() - since),
            building=self._building,
            is_asleep=self._core.is_asleep,
        )

    def _turn(self) -> None:
        for command in self._take(self._seconds_to_wait()):
            self._obey(command)
        if self._core.has_work:
            with self._busy():
                self._step()
        elif self._may_capture:
            self._capture()
        self._send_outputs()

    def _seconds_to_wait(self) -> float | None:
        """For how long there is nothing to do but to wait for commands; None: until one comes."""
        if self._core.has_work:
            return ASLEEP_SECONDS if self._core.is_asleep else 0.0
        return 0.0 if self._may_capture else None

    def _obey(self, command: Command) -> None:
        match command:
            case AddRequests():
                for request in command.requests:
                    self._add(request)
            case AbortRequests():
                for request_id in command.request_ids:
                    self._core.abort(request_id, command.reason, command.stop_reason)
            case Call():
                self._send(self._reply(command))
            case Shutdown():
                self._is_ending = True

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add(request)
        except Exception as error:
            known = (
                error if isinstance(error, LaminaError) else _failure("a request could not be queued", error)
            )
            finish = Finish(reason="abort", times=Timeline(queued=self._clock()), error=known)
            self._core.outputs.append(
                EngineOutput(request_id=request.request_id, num_before=0, finish=finish)
            )

    def _step(self) -> None:
        try:
            with watched(self._note_build):
                self._core.step()
        except InterruptAtRequestError as interrupt:  # in code of a request's own, which has ended by it
            logger.warning("%s", interrupt.failure)
        self._num_steps += 1

    def _send_outputs(self) -> None:
        outputs = tuple(self._core.outputs)
        if not outputs:
            return
        self._core.outputs.clear()
        self._send(StepOutputs(outputs=outputs))
        errors = [output.finish.error for output in outputs if output.finish is not None]
        if any(isinstance(error, (EngineError, EngineDeadError)) for error in errors):
            self._service.check_device()

    def _reply(self, call: Call) -> Reply:
        method = self._methods.get(call.method)
        if method is None:
            wanted = ", ".join(sorted(self._methods))
            error = UnsupportedError(f"method is {shown(call.method)}; wanted one of {wanted}")
            return Reply(number=call.number, error=error)
        try:
            with self._busy(f"a call of {call.method}"):
                return Reply(number=call.number, value=method(*call.arguments))
        except LaminaError as error:
            return Reply(number=call.number, error=error)
        except Exception as error:
            return Reply(number=call.number, error=_failure(f"{call.method} failed", error))

    def _capture(self) -> None:
        """Captures one more size; no more of them once none is left, or one has failed."""
        try:
            with self._busy("CUDA graphs"):
                self._may_capture = self._core.idle()
        except Exception as error:
            self._may_capture = False
            logger.warning("a size could not be captured, and steps of it run without: %s", shown(error))

    def _suspend(self) -> None:
        """Drops every capture, until they are resumed; RequestError while requests are live."""
        self._core.drop_captures()
        self._may_capture = False

    def _resume(self) -> None:
        """Captures every size again."""
        if self._core.has_work:
            raise RequestError("resume while requests are live; wait for them or abort them first")
        while self._core.idle():
            pass
        self._may_capture = True

    def _sleep(self, level: int = 1) -> None:
        """See EngineCore.sleep."""
        self._core.sleep(level)
        self._may_capture = False

    def _wake(self) -> None:
        """See EngineCore.wake; where captures are lazy, they are made as there is time for them."""
        self._core.wake(capture=not self._service.is_lazy)
        self._may_capture = True

    @contextmanager
    def _busy(self, building: str | None = None) -> Iterator[None]:
        self._building, self._busy_since = building, self._clock()
        try:
            yield
        finally:
            self._busy_since = self._building = None

    def _note_build(self, what: str) -> None:
        self._building = what
        self._service.on_build(what)

    def _give_back(self) -> None:
        """Lets go of everything, also where the core is in no state to help."""
        for step in (self._core.close, self._service.give_back):
            with suppress(Exception):
                step()


def _failure(what: str, cause: Exception) -> EngineError:
    failure = EngineError(f"{what}: {shown(cause)}")
    failure.__cause__ = cause
    return failure
