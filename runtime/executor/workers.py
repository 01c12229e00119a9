"""What an executor asks of workers in processes of their own, whoever started them."""

from collections.abc import Callable
from typing import Any, Protocol

from ...common.errors import EngineDeadError

Receive = Callable[[int, Any], None]  # (rank, message); to be called again with one changes nothing
SECONDS_TO_END = 10.0  # for workers that are asked to end
BEAT_SECONDS = 0.5  # between two looks at workers that say nothing


class Workers(Protocol):
    """Workers, one a rank, all of which get every message, in order. One thread at a time may call it.

    Once one of them is lost, all are ended, and whatever is called raises why.
    """

    lost: EngineDeadError | None

    @property
    def num_workers(self) -> int:
        """How many there are, one a rank."""

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The ids of their processes, by rank, each on its own machine."""

    def send(self, message: Any) -> None:
        """Hand a message to every worker. EngineDeadError where one is lost, WireError for no plain data."""

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Receive messages until it is done. EngineDeadError where a worker is lost."""

    def check(self) -> None:
        """EngineDeadError where a worker is lost, as far as that is known."""

    def look(self) -> None:
        """The same, after a look at what has happened meanwhile."""

    def lose(self, why: str) -> None:
        """End all of them by force, since they cannot go on together."""

    def end(self, timeout: float = SECONDS_TO_END) -> None:
        """Ask them to end, end by force those that have not after so many seconds, and give all back."""


StartWorkers = Callable[[int, Receive], Workers]  # (how many, who receives what they say)


def lost_workers(why: str) -> EngineDeadError:
    """The error of every request once workers are lost."""
    return EngineDeadError(f"the workers are lost: {why}; open a new runtime")
