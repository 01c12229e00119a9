"""What workers in processes of their own have answered so far, by what was asked."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
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
        """The ranks on which it failed by itself, as far as they have said."""
        return sorted(
            rank
            for rank, answer in self.answers.items()
            if answer.output.error is not None and not answer.is_passed_on
        )


class WorkerAnswers:
    """Takes answers in and says what they come to. To take one in again changes nothing."""

    def __init__(self, num_workers: int, report: Callable[[LoadProgress], None], num_stages: int = 1) -> None:
        """report: called with how far rank 0 has loaded. num_stages: which have as many ranks each."""
        self._num_in_stage, self._report = num_workers // num_stages, report
        self._answering = num_workers - self._num_in_stage  # the rank that says what steps come to
        self.ready: dict[int, WorkerReady | LaminaError] = {}  # by rank: loaded, or why not
        self.last_failure = 0  # the last step that was sent before the engine heard of one that failed
        self._last_sent = 0
        self._steps: dict[int, SentStep] = {}
        self._calls: dict[int, dict[int, CallDone]] = {}  # by number and rank
        self.parted: str | None = None  # why the ranks cannot go on together, once they cannot

    def expect_step(self, number: int) -> SentStep:
        """A step that is about to be sent."""
        step, self._last_sent = SentStep(number), number
        self._steps[number] = step
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
        answer = step.answers.get(self._answering)
        failed = [] if step.first_failure is None else step.failed_ranks()
        if not failed:
            return None if answer is None or answer.is_passed_on else answer.output
        if not self._are_whole_stages(failed):
            assert step.first_failure is not None
            if time.monotonic() - step.first_failure > SECONDS_TO_AGREE:
                self._part(step, failed[0])
            return None
        if answer is None:  # stages behind have yet to hear of it
            return None
        first, self.last_failure = step.answers[failed[0]], self._last_sent
        return failed_step(_noted(first.output.error, failed[0], first.traceback))

    def _are_whole_stages(self, ranks: Sequence[int]) -> bool:
        """Whether these are all ranks of every stage that has any of them."""
        counts = Counter(rank // self._num_in_stage for rank in ranks)
        return all(count == self._num_in_stage for count in counts.values())

    def _take_in_step(self, rank: int, message: StepDone) -> None:
        step = self._steps.get(message.number)
        if step is None:
            return
        step.answers[rank] = message
        if message.output.error is None:
            return
        step.first_failure = step.first_failure or time.monotonic()
        answer = step.answers.get(self._answering)
        if answer is not None and answer.output.error is None:
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
