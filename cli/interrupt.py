"""Ctrl-C between two tokens instead of inside a step, which would leave the engine half way."""

import signal
from types import FrameType, TracebackType
from typing import Any


class StopOnInterrupt:
    """Inside the block the first Ctrl-C only sets `requested`; the second raises KeyboardInterrupt."""

    requested = False
    _previous: Any = None

    def __enter__(self) -> "StopOnInterrupt":
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
