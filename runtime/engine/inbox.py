"""Where messages for an event loop's thread are left by other threads, and by finalizers."""

import asyncio
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ..protocol.core_messages import Message, StepOutputs
from ..protocol.engine_output import EngineOutput
from .generation import Generation

TURN = 0.005  # seconds of the loop's time, after which others get theirs


class Client(Protocol):
    """Whoever takes out of an inbox what is left there."""

    def deliver(self, seconds: float) -> bool:
        """Take in what has come, for so long and one message more, in the loop's thread.

        Returns whether any is left.
        """

    def abandon(self, request_ids: Sequence[str]) -> None:
        """End requests that nobody can read any more; called in any thread."""


class Inbox:
    """Where the core's thread leaves messages, and finalizers what was dropped: no lock, and one wake-up.

    It knows its client weakly, as the core's thread holds it.
    """

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.messages: deque[Message | None] = deque()
        self.dropped: deque[weakref.ref[Generation]] = deque()
        self._client = weakref.ref(client)
        self._is_woken = False

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake another loop from now on."""
        self.loop, self._is_woken = loop, False

    def put(self, message: Message | None) -> None:
        """Take a message of the core, in any thread."""
        self.messages.append(message)
        if not self._wake() and isinstance(message, StepOutputs):
            self._end(message.outputs)

    def drop(self, reference: "weakref.ref[Generation]") -> None:
        """Take note that nobody holds a generation any more: may be called at any line of any thread."""
        self.dropped.append(reference)
        self._wake()

    def _wake(self) -> bool:
        """Have the client called in its loop's thread, once for all that piles up; False without a loop."""
        if self._is_woken:
            return not self.loop.is_closed()
        self._is_woken = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed
            self._is_woken = False
            return False
        return True

    def _deliver(self) -> None:
        self._is_woken = False
        client = self._client()
        if client is not None and client.deliver(TURN):
            self._wake()  # behind whoever else waits for the loop

    def _end(self, outputs: Sequence[EngineOutput]) -> None:
        """Nobody can read these any more, as their loop is closed."""
        client = self._client()
        live = tuple(output.request_id for output in outputs if output.finish is None)
        if client is not None and live:
            client.abandon(live)
