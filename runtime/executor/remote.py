"""The executor whose workers run in processes of their own, one a rank; what fails in one is an error here.

Rank 0 has a process like all others: whatever hits a worker hits none of the requests' books, no GIL is
shared between planning and running steps, and every rank can be ended by force. Who starts the processes,
and by which way messages reach them, is the affair of Workers.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ...common.errors import ClosedError, EngineDeadError, EngineError, GroupError, UnsupportedError, shown
from ..protocol.process_messages import LoadProgress
from ..protocol.runner_output import RunnerOutput, failed_step
from ..protocol.scheduler_output import SchedulerOutput
from ..protocol.worker_messages import (
    AddGrammar,
    CallWorker,
    ExecuteStep,
    RemoveRequest,
    StartWorker,
    WorkerReady,
)
from ..sampling_params import LogitsProcessor
from .executor import StepHandle
from .worker_answers import SentStep, WorkerAnswers
from .workers import SECONDS_TO_END, StartWorkers


class RemoteExecutor:
    """An Executor over workers in processes of their own, one a rank, to which every step is sent once.

    Where a step fails on all ranks of a stage it failed, and the next one runs; where it fails on some alone
    they have parted, which ends all of them, as does the end of any.
    """

    def __init__(
        self,
        num_workers: int,
        report: Callable[[LoadProgress], None],
        start_workers: StartWorkers,
        num_stages: int = 1,
    ) -> None:
        """report: called with how far rank 0 has loaded. num_stages: which have as many ranks each, in order.

        Raises what start_workers does.
        """
        self._answers = WorkerAnswers(num_workers, report, num_stages)
        self._number = 0  # of what was sent last and is answered
        self._is_shut_down = False
        self._workers = start_workers(num_workers, self._answers.take_in)
        weakref.finalize(self, self._workers.end, 0).atexit = False

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The ids of the workers' processes, by rank."""
        return self._workers.pids

    def start(self, config: bytes, *, log_level: int, num_threads: int) -> None:
        """Have every rank load its part of a pickled RuntimeConfig; returns at once.

        num_threads: on a CPU, of all ranks together.
        """
        own = max(1, num_threads // self._workers.num_workers)
        self._workers.send(StartWorker(config=config, log_level=log_level, num_threads=own))

    def wait_until_ready(self) -> WorkerReady:
        """What rank 0 says of itself once every rank has loaded.

        Raises what loading raises on any rank, and EngineError where ranks have decided differently.
        """
        said = self._answers.ready
        self._workers.wait(lambda: len(said) == self._workers.num_workers or bool(self._failed_to_load()))
        if failed := self._failed_to_load():
            self._raise_first(failed)
        by_rank = [answer for _, answer in sorted(said.items()) if isinstance(answer, WorkerReady)]
        _compare([each.decisions for each in by_rank])
        return by_rank[0]

    def _failed_to_load(self) -> list[Exception]:
        return [answer for answer in self._answers.ready.values() if isinstance(answer, Exception)]

    def _raise_first(self, failed: Sequence[Exception]) -> NoReturn:
        """Raise why loading failed: of a rank that missed another, what became of that one."""
        error = next((each for each in failed if not isinstance(each, GroupError)), failed[0])
        if isinstance(error, GroupError):
            try:
                self._workers.look()
            except EngineDeadError as dead:
                raise dead from error
        raise error

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """See Executor."""
        self._require_open()
        self._number += 1
        step = self._answers.expect_step(self._number)
        known = self._answers.last_failure
        try:
            self._workers.send(ExecuteStep(number=step.number, known_failure=known, plan=plan))
        except Exception as error:
            return _Sent(self, step, error)
        return _Sent(self, step)

    def add_request(
        self,
        request_id: str,
        logits_processors: Sequence[LogitsProcessor] = (),
        grammar: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """See Executor. UnsupportedError for logits processors. An adapter is waited for: it may be gone."""
        self._require_open()
        if logits_processors:
            raise UnsupportedError(
                f"logits_processors holds {shown(logits_processors)}, and code cannot be sent to workers in "
                "processes of their own; use executor='uniproc'"
            )
        if adapter is not None:
            try:
                self.collective_rpc("add_request", request_id, (), grammar, adapter)
            except Exception:
                self.remove_request(request_id)  # of ranks that have it
                raise
        elif grammar is not None:
            self._workers.send(AddGrammar(request_id=request_id, grammar=grammar))

    def remove_request(self, request_id: str) -> None:
        """See Executor; after shutdown() none is known."""
        if not self._is_shut_down and self._workers.lost is None:
            self._workers.send(RemoveRequest(request_id=request_id))

    def capture_next(self) -> bool:
        """See Executor."""
        return bool(self.collective_rpc("capture_next")[0])

    def drop_captures(self) -> None:
        """See Executor."""
        self.collective_rpc("drop_captures")

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """See Executor; arguments and answers are plain data. What it raises on the lowest rank is raised."""
        self._require_open()
        self._number += 1
        answers = self._answers.expect_call(self._number)
        self._workers.send(CallWorker(number=self._number, method=method, arguments=args))
        self._workers.wait(lambda: len(answers) == self._workers.num_workers)
        by_rank = [answers[rank] for rank in range(self._workers.num_workers)]
        for rank, answer in enumerate(by_rank):
            if answer.error is not None:
                answer.error.add_note(f"on rank {rank}:\n{answer.traceback}")
                raise answer.error
        return [answer.value for answer in by_rank]

    def check(self) -> None:
        """See Executor."""
        self._require_open()
        self._workers.look()

    def shutdown(self, timeout: float = SECONDS_TO_END) -> None:
        """See Executor; workers that have not ended after so many seconds are ended by force."""
        self._is_shut_down = True
        self._workers.end(timeout)

    def outcome_of(self, step: SentStep) -> RunnerOutput:
        """What a step came to, once that is known. EngineDeadError where the workers are lost."""
        self._require_open()
        answers = self._answers
        self._workers.wait(lambda: answers.parted is not None or answers.outcome(step) is not None)
        if answers.parted is not None:
            self._workers.lose(answers.parted)
        self._workers.check()
        output = answers.outcome(step)
        assert output is not None
        return output

    def _require_open(self) -> None:
        if self._is_shut_down:
            raise ClosedError("this executor was shut down; make a new one")


class _Sent:
    """A step in flight; see StepHandle."""

    __slots__ = ("_executor", "_step", "error")

    def __init__(self, executor: RemoteExecutor, step: SentStep, error: Exception | None = None) -> None:
        self._executor, self._step, self.error = executor, step, error

    def result(self) -> RunnerOutput:
        if self.error is not None:
            return failed_step(self.error)
        try:
            return self._executor.outcome_of(self._step)
        except Exception as error:
            return failed_step(error)


def _compare(decisions: Sequence[dict[str, str]]) -> None:
    """EngineError where a rank has decided otherwise than rank 0."""
    for rank, other in enumerate(decisions):
        for name in sorted({*decisions[0], *other}):
            own, theirs = decisions[0].get(name), other.get(name)
            if own != theirs:
                raise EngineError(
                    f"ranks do not fit together: {name} is {shown(own)} on rank 0 and {shown(theirs)} on "
                    f"rank {rank}; wanted the same hardware, packages and settings for all"
                )
