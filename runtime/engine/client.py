"""The only way into an engine: one caller at a time, and what was dropped meanwhile is ended first."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from ...common.errors import RequestError
from ...compiler.torch_internals.torch_section import neutral
from .engine_core import Engine
from .output_processor import Generation

T = TypeVar("T")


class Ticket:
    """Held by whoever asked for something: what it stands for is ended when nobody has it any more."""

    __slots__ = ("__weakref__", "reference")

    reference: "weakref.ref[Ticket] | None"

    def __init__(self) -> None:
        self.reference = None


class Guard:
    """Lets one thread at a time into the engine, and nobody while it is inside.

    Whoever drops a stream, be it the garbage collector at any line of any thread, only puts its ticket's
    reference into a queue, which takes one call of C: no lock, and nothing that could be interrupted. The
    next to enter or to leave ends what the queue names.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine | None = engine
        self._lock = threading.RLock()
        self._inside = threading.Lock()  # tells the thread that holds the other whether it is inside
        self._asked: dict[weakref.ref[Ticket], tuple[Generation, ...]] = {}
        self._dropped: deque[weakref.ref[Ticket]] = deque()

    def __call__(self, action: Callable[[], T]) -> T:
        """Let something happen to the engine; RequestError inside of another such thing."""
        # On one line: an interrupt on the way back from a second one to the first would keep the lock.
        with self._lock: return self._enter(action)  # fmt: skip # noqa: E701

    def look(self, read: Callable[[], T]) -> T:
        """Read something that is changed inside: as it is, where this thread is inside."""
        with self._lock: return self._enter(read) if not self._inside.locked() else read()  # fmt: skip # noqa: E701

    def start(self, ticket: Ticket, generations: Iterable[Generation]) -> None:
        """Queue requests, from inside, to be ended when the ticket is dropped."""
        assert self.engine is not None
        reference = weakref.ref(ticket, self._dropped.append)
        self._asked[reference] = tuple(generations)
        ticket.reference = reference
        for generation in self._asked[reference]:
            self.engine.add(generation)

    def drop(self, ticket: Ticket) -> None:
        """End what is left of a ticket's requests: soon, as this may be called anywhere."""
        if ticket.reference is not None:
            self._dropped.append(ticket.reference)

    def _enter(self, action: Callable[[], T]) -> T:
        if self._inside.locked():
            raise RequestError(
                "this runtime was called from inside one of its own steps, as by a logits processor, a "
                "tokenizer or a signal handler of yours; call it when the step is over"
            )
        with self._inside: return self._between_ends(action)  # fmt: skip # noqa: E701

    def _between_ends(self, action: Callable[[], T]) -> T:
        with neutral():  # what a caller set for tensors of his own is not ours
            try:
                self._end_dropped()
                return action()
            finally:
                self._end_dropped()

    def _end_dropped(self) -> None:
        while self._dropped:
            reference = self._dropped[0]
            for generation in self._asked.get(reference, ()):
                if self.engine is not None:
                    self.engine.abort(generation.request.request_id)
            self._asked.pop(reference, None)
            self._dropped.popleft()
