"""What workers in processes of their own have answered so far, by what was asked."""

import time
from collections.abc import Callable
from typing import Any

from ...common.errors import LaminaError
from ..protocol.process_messages import CoreLost, LoadProgress
from ..protocol.runner_output import RunnerOutput, failed_step
from ..protocol.worker_messages import CallDone, StepDone, WorkerReady

SECONDS_TO_AGREE = 2.0  # after a step has failed on one rank, for all others to say the same
MOST_KEPT = 64  # steps, of which one may fail late


class SentStep:
    """A step that the workers were sent, and what each rank has said of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answers: dict[int, StepDone] = {}  # by rank
        self.first_failure: float | None = None  # by time.monotonic()

    def failed_ranks(self) -> list[int]:
        """The ranks on which it failed, as far as they have said."""
        return sorted(rank for rank, answer in self.answers.items() if answer.output.error is not None)


class WorkerAnswers:
    """Takes answers in and says what they come to. To take one in again changes nothing."""

    def __init__(self, num_workers: int, report: Callable[[LoadProgress], None]) -> None:
        """report: called with how far rank 0 has loaded."""
        self._num_workers, self._report = num_workers, report
        self.ready: dict[int, WorkerReady | LaminaError] = {}  # by rank: loaded, or why not
        self.last_failure = 0  # the number of the last step that is known to have failed
        self._steps: dict[int, SentStep] = {}
        self._calls: dict[int, dict[int, CallDone]] = {}  # by number and rank
        self.parted: str | None = None  # why the ranks cannot go on together, once they cannot

    def expect_step(self, number: int) -> SentStep:
        """A step that is about to be sent."""
        step = self._steps[number] = SentStep(number)
        self._steps.pop(number - MOST_KEPT, None)
        return step

    def expect_call(self, number: int) -> dict[int, CallDone]:
        """A call that is about to be sent; its answers by rank, as they come."""
        self._calls = {number: {}}
        return self._calls[number]

    def take_in(self, rank: int, message: Any) -> None:
        """Note what a rank has said."""
        match message:
            case StepDone():
                self._take_in_step(rank, message)
            case CallDone() if message.number in self._calls:
                self._calls[message.number][rank] = message
            case WorkerReady():
                self.ready[rank] = message
            case CoreLost():
                self.ready[rank] = message.error
            case LoadProgress() if rank == 0:
                self._report(message)

    def outcome(self, step: SentStep) -> RunnerOutput | None:
        """What a step came to; None while that is open, and once ranks have parted."""
        failed = step.failed_ranks()
        if not failed:
            return step.answers[0].output if 0 in step.answers else None
        if len(failed) == self._num_workers:
            return failed_step(_noted(step.answers[0].output.error, 0, step.answers[0].traceback))
        assert step.first_failure is not None
        if time.monotonic() - step.first_failure > SECONDS_TO_AGREE:
            self._part(step, failed[0])
        return None

    def _take_in_step(self, rank: int, message: StepDone) -> None:
        step = self._steps.get(message.number)
        if step is None:
            return
        step.answers[rank] = message
        if message.output.error is None:
            return
        step.first_failure = step.first_failure or time.monotonic()
        self.last_failure = max(self.last_failure, message.number)
        if rank and 0 in step.answers and step.answers[0].output.error is None:
            self._part(step, rank)

    def _part(self, step: SentStep, rank: int) -> None:
        answer = step.answers[rank]
        self.parted = (
            f"a step failed on rank {rank} and not on all others: {answer.output.error}\n{answer.traceback}"
        )


def _noted(error: Exception | None, rank: int, traceback: str) -> Exception:
    """The error with where it was raised, for whoever prints it."""
    assert error is not None
    error.add_note(f"on rank {rank}:\n{traceback}")
    return error
