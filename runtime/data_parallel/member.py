"""One engine among several: its process, and what is asked of it beside what clients ask."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from ...common.errors import EngineDeadError, LaminaError
from ..engine.core_handle import CoreHandle
from ..protocol.core_messages import Call, Message, Reply


class OwnedCore(CoreHandle, Protocol):
    """A core that can be ended at once."""

    def drop(self) -> None:
        """End it by force; may be called at any line of any thread."""


class Member:
    """An engine's process from its start to its end; another one follows a lost one under the same number."""

    def __init__(self, number: int, core: OwnedCore) -> None:
        self.number, self.core = number, core
        self._lock = threading.Lock()
        self._numbers = itertools.count(-1, -1)  # below those of clients
        self._asked: dict[int, Future[Any]] = {}
        self.is_gone = False

    def start(self, receive: Callable[["Member", Message | None], None]) -> None:
        """Has receive called with what it says, less the replies to ask(); None: it is gone."""

        def take(message: Message | None) -> None:
            if message is None:
                self._fail_asked()
            elif isinstance(message, Reply) and self._is_own(message):
                return
            receive(self, message)

        self.core.start(take)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Waits for what a method of the engine returns; raises its error, or EngineDeadError."""
        reply: Future[Any] = Future()
        with self._lock:
            if self.is_gone:
                raise EngineDeadError(str(self.core.status().reason))
            number = next(self._numbers)
            self._asked[number] = reply
        self.core.send(Call(number=number, method=method, arguments=arguments))
        return reply.result()

    @property
    def dead(self) -> EngineDeadError:
        """What ends its requests once it is lost."""
        reason = self.core.status().reason
        return EngineDeadError(f"engine {self.number} is lost: {reason}; ask again, as others serve")

    def _is_own(self, reply: Reply) -> bool:
        with self._lock:
            waiting = self._asked.pop(reply.number, None)
        if waiting is None:
            return False
        if reply.error is not None:
            waiting.set_exception(reply.error)
        else:
            waiting.set_result(reply.value)
        return True

    def _fail_asked(self) -> None:
        with self._lock:
            self.is_gone = True
            asked, self._asked = self._asked, {}
        error: LaminaError = EngineDeadError(str(self.core.status().reason))
        for waiting in asked.values():
            waiting.set_exception(error)
