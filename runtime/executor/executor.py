"""What an engine asks of its workers, wherever they run: plain data passes, no objects of either."""

from collections.abc import Sequence
from typing import Any, Protocol

from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import SchedulerOutput
from ..sampling_params import LogitsProcessor


class StepHandle(Protocol):
    """A step in flight."""

    @property
    def error(self) -> Exception | None:
        """Why the step failed, where that is known without waiting; no other may be launched on top of it."""

    def result(self) -> RunnerOutput:
        """What the step came to, once the device is done; an Exception of its own is `error` of that.

        KeyboardInterrupt, and whatever else is no Exception, passes through.
        """


class Executor(Protocol):
    """The engine's only way to a device. One thread at a time may call it."""

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Launch a step, after all that were launched before; returns at once, whether or not it fails."""

    def add_request(
        self,
        request_id: str,
        logits_processors: Sequence[LogitsProcessor] = (),
        grammar: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Let the workers know a request's own logits processors, grammar and adapter, before any plan.

        Called only for requests that bring any. RequestError for an adapter that is not there.
        """

    def remove_request(self, request_id: str) -> None:
        """Let go of what add_request brought; a request that is not known is none of the executor's."""

    def capture_next(self) -> bool:
        """Capture one more size, which steps replay from then on; False where none is left.

        No step may be in flight.
        """

    def drop_captures(self) -> None:
        """Drop every capture and its memory; the sizes are to be captured again. No step may be in flight."""

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """What a public method of every worker returns for these, one answer a worker, in their order.

        UnsupportedError for a method that workers do not have.
        """

    def check(self) -> None:
        """EngineDeadError where workers are lost, as far as that is known; never waits."""

    def shutdown(self) -> None:
        """Stop the workers, join what was started for them, and free what they hold; twice is once."""
