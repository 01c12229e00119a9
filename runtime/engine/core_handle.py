"""How an async client reaches a core, in a thread or in a process of its own."""

from collections.abc import Callable
from typing import Protocol

from ..protocol.core_messages import Command, CoreStatus, Message

Receiver = Callable[[Message | None], None]  # None: the core is gone, and no message follows


class CoreHandle(Protocol):
    """A core that runs elsewhere."""

    @property
    def takes_objects(self) -> bool:
        """Whether requests may hold objects such as logits processors: only where no process lies between."""

    def start(self, receive: Receiver) -> None:
        """Let the core run; receive is called once a message, from a thread of the handle's own."""

    def send(self, command: Command) -> None:
        """Hand over a command, in order; never waits. One for a core that is gone is dropped."""

    def status(self) -> CoreStatus:
        """Whether the core can step; any thread may ask, and it never waits."""

    def close(self, timeout: float = 10.0) -> None:
        """Send Shutdown, wait so long, end it by force then, and join it; a second call does nothing."""
