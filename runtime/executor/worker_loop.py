"""The loop of a worker in a process of its own: take messages, run steps, send what came of them."""

import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ...common.errors import EngineError, LaminaError, clipped, shown
from ...compiler.torch_internals.torch_section import neutral
from ...custom_ops._shared.ledger import Watcher, watched
from ..protocol.core_messages import Shutdown
from ..protocol.runner_output import RunnerOutput, failed_step
from ..protocol.worker_messages import AddGrammar, CallDone, CallWorker, ExecuteStep, RemoveRequest, StepDone
from ..worker.deferred_step import Step
from ..worker.model_runner import ModelRunner
from ..worker.stage_link import EarlierStageFailedError
from .uniproc import call_worker

Take = Callable[[float | None], Any]  # (seconds to wait, None for ever) -> the next message, or None
SECONDS_BETWEEN_LOOKS = 0.0001  # at a step that the device computes


class WorkerLoop:
    """Runs a rank's steps in the order in which they were sent. One thread runs it.

    One rank says what a step came to; any rank says that a step failed there. A step that was sent on top of
    one that failed is not run: it fails, too.
    """

    def __init__(
        self,
        runner: ModelRunner,
        facts: Mapping[str, Callable[[], Any]],
        *,
        answers: bool,
        take: Take,
        send: Callable[[Any], None],
        on_build: Watcher,
    ) -> None:
        """facts: what may be asked for beside the runner's methods. answers: whether this rank says what
        steps come to. on_build: told what steps build."""
        self._runner, self._facts, self._answers = runner, facts, answers
        self._take, self._send, self._on_build = take, send, on_build
        self._pending: deque[tuple[int, Step]] = deque()  # that are not read
        self._failure = 0  # the number of the last step that failed here

    def run(self) -> None:
        """Returns after a Shutdown, with everything given back."""
        try:
            with neutral(), watched(self._on_build):  # once: nobody else's code runs in this thread
                self._run()
        finally:
            self._runner.close()

    def _run(self) -> None:
        while True:
            is_done = bool(self._pending) and self._pending[0][1].is_done
            message = None if is_done else self._take(self._patience())
            if isinstance(message, Shutdown):
                return
            self._obey(message)

    def _patience(self) -> float | None:
        """How long to wait for a message: a step in flight is read as soon as it is done."""
        return SECONDS_BETWEEN_LOOKS if self._pending else None

    def _obey(self, message: Any) -> None:
        match message:
            case None:
                if self._pending[0][1].is_done:
                    self._read_oldest()
            case ExecuteStep():
                self._execute(message)
            case AddGrammar():
                self._runner.add_request(message.request_id, (), message.grammar)
            case RemoveRequest():
                self._runner.remove_request(message.request_id)
            case CallWorker():
                self._answer(message)

    def _execute(self, message: ExecuteStep) -> None:
        if message.known_failure < self._failure:
            self._say_failed(message.number, EngineError("a step that failed came before it"))
            self._runner.skip(message.plan)
            return
        try:
            launched = self._runner.execute(message.plan)
            if not self._answers:
                launched.launched()
        except Exception as error:
            self._fail(message.number, error)
            return
        if self._answers:
            self._pending.append((message.number, launched))
            self._settle_oldest()

    def _read_oldest(self) -> None:
        number, launched = self._pending.popleft()
        try:
            output: RunnerOutput = launched.read()
        except Exception as error:
            self._fail(number, error)
        else:
            self._send(StepDone(number=number, output=output))
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        """Launch what is left of a step when the one before is read: what comes next may not come soon."""
        if self._pending:
            self._pending[0][1].settle()

    def _fail(self, number: int, error: Exception) -> None:
        if not isinstance(error, EarlierStageFailedError):
            self._failure = number
            self._say_failed(number, error)
            return
        self._runner.forget()
        if self._answers:
            self._say_failed(number, error, is_passed_on=True)

    def _say_failed(self, number: int, error: Exception, *, is_passed_on: bool = False) -> None:
        failed, traceback = failed_step(as_known(error)), _traceback_of(error)
        self._send(StepDone(number=number, output=failed, traceback=traceback, is_passed_on=is_passed_on))

    def _answer(self, call: CallWorker) -> None:
        try:
            value = call_worker(self._runner, self._facts, call.method, call.arguments)
        except Exception as error:
            known = as_known(error)
            self._send(CallDone(number=call.number, error=known, traceback=_traceback_of(error)))
        else:
            self._send(CallDone(number=call.number, value=value))


def as_known(error: BaseException) -> LaminaError:
    """The error as one that can be sent: itself, or an EngineError with its words."""
    if isinstance(error, LaminaError):
        return error
    return EngineError(shown(error, 500))


def _traceback_of(error: BaseException) -> str:
    text = clipped("".join(traceback.format_exception(error)))
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
