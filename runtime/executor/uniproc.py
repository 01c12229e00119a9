"""The executor whose only worker runs in this process, in the thread that calls it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...common.errors import ClosedError, UnsupportedError, shown
from ..protocol.runner_output import RunnerOutput, failed_step
from ..protocol.scheduler_output import SchedulerOutput
from ..sampling_params import LogitsProcessor
from ..worker.deferred_step import Step
from ..worker.model_runner import ModelRunner
from .executor import StepHandle


class UniprocExecutor:
    """An Executor over one model runner, which it owns from now on."""

    def __init__(
        self, model_runner: ModelRunner, facts: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        """facts: what collective_rpc may ask for beside the runner's own methods."""
        self._model_runner: ModelRunner | None = model_runner
        self._facts = {} if facts is None else facts

    @property
    def model_runner(self) -> ModelRunner:
        """The only worker; ClosedError after shutdown()."""
        if self._model_runner is None:
            raise ClosedError("this executor was shut down; make a new one")
        return self._model_runner

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """See Executor."""
        runner = self.model_runner
        try:
            return _Launched(runner.execute(plan))
        except Exception as error:
            return _Failed(error)

    def add_request(
        self,
        request_id: str,
        logits_processors: Sequence[LogitsProcessor] = (),
        grammar: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """See Executor."""
        self.model_runner.add_request(request_id, logits_processors, grammar, adapter)

    def remove_request(self, request_id: str) -> None:
        """See Executor; after shutdown() none is known."""
        if self._model_runner is not None:
            self._model_runner.remove_request(request_id)

    def capture_next(self) -> bool:
        """See Executor."""
        return self.model_runner.capture_next()

    def drop_captures(self) -> None:
        """See Executor."""
        self.model_runner.drop_captures()

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """See Executor."""
        return [call_worker(self.model_runner, self._facts, method, args)]

    def check(self) -> None:
        """See Executor: it is here."""

    def shutdown(self) -> None:
        """See Executor."""
        runner, self._model_runner, self._facts = self._model_runner, None, {}
        if runner is not None:
            runner.close()


def call_worker(
    runner: ModelRunner, facts: Mapping[str, Callable[..., Any]], method: str, args: Sequence[Any]
) -> Any:
    """What a fact or a public method of a runner returns; UnsupportedError for one that there is not."""
    own = None if method.startswith("_") else getattr(runner, method, None)
    call = facts.get(method, own)
    if not callable(call):
        known = ", ".join(("a public method of ModelRunner", *facts))
        raise UnsupportedError(f"method is {shown(method)}; wanted {known}")
    return call(*args)


class _Launched:
    """A step that the device was given."""

    __slots__ = ("_step",)
    error: Exception | None = None

    def __init__(self, step: Step) -> None:
        self._step = step

    def result(self) -> RunnerOutput:
        try:
            return self._step.read()
        except Exception as error:
            return failed_step(error)


class _Failed:
    """A step that could not be launched."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error

    def result(self) -> RunnerOutput:
        assert self.error is not None
        return failed_step(self.error)
