"""How an async client reaches a core, in a thread or in a process of its own."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

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


EngineState = Literal["serving", "draining", "drained", "lost"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """How one of several engines is, as those know it that give it requests."""

    number: int  # from 0
    state: EngineState  # draining: it takes no new requests, and has some
    status: CoreStatus  # of a lost one: why it is, and what becomes of it
    num_requests: int  # that it has, waiting or running
    num_given: int  # requests since the start
    num_given_by_prefix: int  # of these, since it knew how they begin


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

    def send(self, command: Command) -> int | None:
        """Hand over a command, in order, from any thread; never waits. A core that is gone takes none.

        Returns the engine that was given requests, where there are several.
        """

    def status(self) -> CoreStatus:
        """Whether the core can step; any thread may ask, and it never waits."""

    def close(self, timeout: float = 10.0) -> None:
        """Send Shutdown, wait so long, end it by force then, and join it; a second call does nothing.

        While it loads, loading is given up. Must not be called from inside of receive.
        """


@runtime_checkable
class SeveralCores(Protocol):
    """What a handle of several engines knows beside: each by its number, from 0."""

    def reports(self) -> tuple[EngineReport, ...]:
        """How each engine is; any thread may ask, and it never waits."""

    def num_taking(self) -> int:
        """How many take requests; likewise."""

    def drain(self, engine: int) -> None:
        """Give an engine no more requests. RequestError for the last that takes any, or one there is not."""

    def resume(self, engine: int) -> None:
        """Give it requests again."""
