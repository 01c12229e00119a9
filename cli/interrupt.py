"""Ctrl-C while an answer is written: between two tokens, or at once while there is none yet."""

import signal
from types import FrameType, TracebackType
from typing import Any


class StopOnInterrupt:
    """Inside the block the first Ctrl-C only sets `requested`; the second raises KeyboardInterrupt.

    While `is_waiting` the first raises it, too: a long prompt gives nothing between which to stop. The engine
    takes a step back that an interrupt hits.
    """

    requested = False
    is_waiting = False
    _previous: Any = None

    def __enter__(self) -> "StopOnInterrupt":
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        was_requested, self.requested = self.requested, True
        if was_requested or self.is_waiting:
            raise KeyboardInterrupt


class RaiseOnInterrupt:
    """Inside the block Ctrl-C raises KeyboardInterrupt, as Python has it."""

    _previous: Any = None

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)


class RaiseOnTermination(RaiseOnInterrupt):
    """Inside the block SIGTERM and SIGHUP raise SystemExit, too, so that what is half made is removed.

    Its code is that of a process which the signal has ended. A signal that is ignored stays so.
    """

    def __enter__(self) -> None:
        super().__enter__()
        self._others = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        for number, handler in self._others.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, _exit)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._others.items():
            signal.signal(number, handler)
        super().__exit__(kind, error, trace)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
