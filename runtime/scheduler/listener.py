"""What whoever listens to a scheduler hears: every event, and every decision, after it was made."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..kv_cache.manager import KVCacheManager
from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import SchedulerOutput
from .config import SchedulerConfig
from .request import Request


class Listener(Protocol):
    """Listens to a scheduler, in the thread and in the call in which things happen; changes nothing."""

    def on_start(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        """A scheduler begins, with these limits and this cache, which is empty."""

    def on_add(self, request: Request) -> None:
        """A request was queued."""

    def on_finish(self, request: Request) -> None:
        """A request was ended from outside, by abort, finish or its deadline."""

    def on_schedule(self, plan: SchedulerOutput | None) -> None:
        """A step was planned, or none could be."""

    def on_update(
        self,
        plan: SchedulerOutput,
        output: RunnerOutput,
        received: Sequence[Request],
        num_forced: Mapping[Request, int],
    ) -> None:
        """A step's tokens were taken in by these requests, some of which may have ended by that.

        num_forced: of those that took in tokens that were forced to follow, how many.
        """

    def on_commit(self, request: Request) -> None:
        """Of a live request blocks were given back, which others may find from now on."""

    def on_discard(self, plan: SchedulerOutput) -> None:
        """A step, and all after it, counts as never begun."""

    def on_reopen(self, waiting: Sequence[Request], num_launched: int) -> None:
        """The books were opened anew: these wait, nothing is computed, and so many steps were launched."""
