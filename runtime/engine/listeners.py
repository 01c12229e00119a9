"""Who counts and measures what becomes of requests, and hears of it once those who read have."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...common.errors import LaminaError
from ...common.logging import get_logger
from ..protocol.engine_output import EngineOutput, FinishReason, Timeline

logger = get_logger("runtime")


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRequest:
    """One answer that has ended, for whoever counts and measures."""

    request_id: str  # what the caller knows it by
    index: int
    times: Timeline
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    finish_reason: FinishReason
    max_tokens: int | None
    n: int  # answers that are being written to its prompt
    error: LaminaError | None


class EngineListener(Protocol):
    """Hears what becomes of requests, in the event loop's thread; one that raises is heard no more."""

    def outputs(self, outputs: Sequence[EngineOutput], now: float) -> None:
        """What a step brought, once a step; now: by time.monotonic()."""

    def finished(self, request: FinishedRequest) -> None:
        """The end of one answer, whatever ended it."""


class Listeners:
    """Listeners of an engine, with what they have not heard yet."""

    def __init__(self) -> None:
        self._listeners: list[EngineListener] = []
        self._calls: deque[Callable[[EngineListener], None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def add(self, listener: EngineListener) -> None:
        """Has it hear what is noted from now on."""
        self._listeners.append(listener)

    def note(self, call: Callable[[EngineListener], None]) -> None:
        """Notes what each is to be called with: by tell(), in order."""
        self._calls.append(call)

    def tell(self) -> None:
        """Calls each with what was noted."""
        while self._calls:
            call = self._calls.popleft()
            for listener in [*self._listeners]:
                try:
                    call(listener)
                except Exception:
                    self._listeners.remove(listener)
                    logger.exception("a listener of the engine failed, and hears no more: %r", type(listener))
