"""What a step on a CPU does while it is recorded: kernels note their calls, tensors lie where they stay."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Protocol

from torch import Tensor


class Recorder(Protocol):
    """Who takes down the calls of a step, to make them again without what is around them."""

    def note(self, call: Callable[[], Any], result: Any) -> None:
        """A kernel was called in this way and returned this; it reads and writes where it did."""

    def place(self, new: Tensor) -> Tensor:
        """A tensor like a new one, in memory that is this step's whenever its calls are made again."""

    def refuse(self, why: str) -> None:
        """What comes next does not tell what it does: raises, so that nothing is recorded."""


class _Active(threading.local):
    recorder: Recorder | None = None


_ACTIVE = _Active()


@contextmanager
def recorded_by(recorder: Recorder | None) -> Iterator[None]:
    """Calls of this thread are told to the recorder meanwhile, or to nobody."""
    before, _ACTIVE.recorder = _ACTIVE.recorder, recorder
    try:
        yield
    finally:
        _ACTIVE.recorder = before


def note(function: Callable[..., Any], arguments: tuple[Any, ...], result: Any) -> None:
    """Tell a call that was made, if anyone listens."""
    recorder = _ACTIVE.recorder
    if recorder is not None:
        recorder.note(partial(function, *arguments), result)


def noted(kernel: Callable[..., None]) -> Callable[..., None]:
    """A kernel that tells its calls."""

    @wraps(kernel)
    def call(*arguments: Any) -> None:
        kernel(*arguments)
        note(kernel, arguments, None)

    return call


def placed(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An allocation that leaves the place to whoever listens."""

    @wraps(allocate)
    def call(*arguments: Any) -> Tensor:
        new, recorder = allocate(*arguments), _ACTIVE.recorder
        return new if recorder is None else recorder.place(new)

    return call


def untold(call: Callable[[list[Any]], Any], why: str) -> Callable[[list[Any]], Any]:
    """A call of code that nobody knows, which is never recorded."""

    @wraps(call)
    def refuse_and_call(arguments: list[Any]) -> Any:
        if _ACTIVE.recorder is not None:
            _ACTIVE.recorder.refuse(why)
        return call(arguments)

    return refuse_and_call
