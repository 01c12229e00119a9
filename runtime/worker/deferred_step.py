"""A step whose forward pass is launched, and whose samples are once the masks of its grammars are made."""

from collections.abc import Callable

import torch
from msgspec.structs import replace

from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import Adjusted, SchedulerOutput
from .launched_step import LaunchedStep, NewestTokens
from .logits_adjuster import Adjuster, BegunChoice


class Choice:
    """How the adjusted samples of a step are chosen, before anything of it has happened."""

    def __init__(
        self, adjuster: Adjuster, plan: SchedulerOutput, adjusted: Adjusted, last: "Step | None"
    ) -> None:
        """adjusted: of the plan. last: the step before, if there was any."""
        self._adjuster = adjuster
        self._newest = NewestTokens(plan, last)
        self.constrained = tuple(map(self._newest.placed, adjusted.constrained))
        self._adjusted = replace(adjusted, constrained=self.constrained)
        self._held = adjuster.grammars.held(self.constrained)

    @property
    def waits_for_masks_alone(self) -> bool:
        """Whether there are masks to be made, and no request's own code is called with the tokens so far."""
        return bool(self.constrained) and not self._adjusted.histories

    @torch.inference_mode()
    def begin(self) -> BegunChoice:
        """Begin with the masks, if there are any, which waits for the tokens of the step before."""
        return self._adjuster.begin(self._adjusted, self._held, self._newest)


class DeferredStep:
    """A step in two parts, read like a LaunchedStep, which it becomes.

    The tokens of the step before decide its masks. They are begun when those have arrived, and made while the
    host takes them in and plans the next step; settle() then launches its samples, before anything else is.
    So the host has all of a forward pass for both. An error is raised by what asks for its samples.
    """

    def __init__(
        self,
        last: "Step | None",
        begin: Callable[[], BegunChoice],
        finish: Callable[[BegunChoice], LaunchedStep],
    ) -> None:
        """last: the step before, if there was any.

        begin and finish may be called again where an interrupt hit them, and come to the same.
        """
        self._begin: Callable[[], BegunChoice] | None = begin
        self._finish: Callable[[BegunChoice], LaunchedStep] | None = finish
        self._begun: BegunChoice | None = None
        self._step: LaunchedStep | None = None
        self._error: Exception | None = None
        if last is None:
            self.begin()
        else:
            last.when_there(self.begin)

    def begin(self) -> None:
        """Have its masks made; the tokens of the step before are waited for."""
        if self._begun is None and self._begin is not None:
            try:
                self._begun = self._begin()
            except Exception as error:
                self._fail(error)

    def settle(self) -> None:
        """Launch its samples; a second call does nothing. Its own errors are kept for who reads it."""
        self.begin()
        if self._step is None and self._begun is not None and self._finish is not None:
            try:
                self._step = self._finish(self._begun)
            except Exception as error:
                self._fail(error)
        self._let_go()

    @property
    def is_done(self) -> bool:
        """Whether it is settled, and the device has computed it."""
        return self._error is not None or (self._step is not None and self._step.is_done)

    def when_there(self, call: Callable[[], None]) -> None:
        """See LaunchedStep; nothing where it has failed."""
        self.settle()
        if self._step is not None:
            self._step.when_there(call)

    def newest(self) -> list[int]:
        """See LaunchedStep."""
        return self.launched().newest()

    def left(self, row: int) -> tuple[int, list[int]]:
        """See LaunchedStep."""
        return self.launched().left(row)

    def read(self) -> RunnerOutput:
        """See LaunchedStep."""
        return self.launched().read()

    def launched(self) -> LaunchedStep:
        """What it has become, once it is settled; raises why it failed."""
        self.settle()
        if self._step is None:
            assert self._error is not None, "a step that is neither launched nor failed"
            raise self._error
        return self._step

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._let_go()

    def _let_go(self) -> None:
        """Of what it was to be made of, and the step before."""
        self._begin = self._finish = self._begun = None


Step = LaunchedStep | DeferredStep
