"""How an async client reaches a core, in a thread or in a process of its own."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from ..protocol.core_description import CoreDescription
from ..protocol.core_messages import Command, CoreStatus, Message
from ..structured_output.compiler import GrammarCompiler
from ..tokenization.tokenizer import Tokenizer

Receiver = Callable[[Message | None], None]  # None: the core is gone, and no message follows


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedCore:
    """A core that is ready to step, as those who check and write requests for it know it."""

    description: CoreDescription
    tokenizer: Tokenizer | None
    grammars: GrammarCompiler | None = None  # the core's own, where no process lies between


class CoreHandle(Protocol):
    """A core that runs elsewhere. To make a handle begins to load, and returns at once."""

    @property
    def takes_objects(self) -> bool:
        """Whether requests may hold objects such as logits processors: only where no process lies between."""

    @property
    def opened(self) -> Future[OpenedCore]:
        """Done when the core can step, or with the error that loading raised; cannot be cancelled."""

    def start(self, receive: Receiver) -> None:
        """Once opened: have receive called once a message, from a thread of the handle's own."""

    def send(self, command: Command) -> None:
        """Hand over a command, in order, from any thread; never waits. A core that is gone takes none."""

    def status(self) -> CoreStatus:
        """Whether the core can step; any thread may ask, and it never waits."""

    def close(self, timeout: float = 10.0) -> None:
        """Send Shutdown, wait so long, end it by force then, and join it; a second call does nothing.

        While it loads, loading is given up. Must not be called from inside of receive.
        """
