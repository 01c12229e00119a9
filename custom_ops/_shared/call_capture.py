"""Capture of a step's kernel calls on a CPU: kernels add their calls, tensors get static memory."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class PackedCall:
    """A kernel's entry point and its one argument, which each call is made with again."""

    __slots__ = ("argument", "entry")

    def __init__(self, entry: Callable[[bytes], int], argument: bytes) -> None:
        self.entry, self.argument = entry, argument

    def __call__(self) -> int:
        return self.entry(self.argument)


class CallCapture(Protocol):
    """Who captures the kernel calls of a step, to replay them without the Python around them."""

    def add_call(self, call: Callable[[], Any], result: Any) -> None:
        """A kernel was called and returned `result`; the call reads and writes the same memory again."""

    def allocate(self, new: Tensor) -> Tensor:
        """A tensor of the shape, strides and dtype of `new`, in memory that stays for every replay."""

    def refuse(self, why: str) -> None:
        """Raise, so that nothing is captured: the code that comes next does not add its calls."""


class _Active(threading.local):
    capture: CallCapture | None = None


_ACTIVE = _Active()


@contextmanager
def captured_by(capture: CallCapture | None) -> Iterator[None]:
    """Inside the block kernel calls of this thread are added to the capture; None: to none."""
    before, _ACTIVE.capture = _ACTIVE.capture, capture
    try:
        yield
    finally:
        _ACTIVE.capture = before


def add_call(function: Callable[..., Any], arguments: tuple[Any, ...], result: Any) -> None:
    """Add a call that was made to the capture under way, if there is one."""
    capture = _ACTIVE.capture
    if capture is not None:
        capture.add_call(partial(function, *arguments), result)


def add_packed_call(entry: Callable[[bytes], int], argument: bytes, result: int) -> None:
    """The same of a native entry point, so that nothing but native code need make the call again."""
    capture = _ACTIVE.capture
    if capture is not None:
        capture.add_call(PackedCall(entry, argument), result)


def capturable(kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel, whose calls are added to the capture under way."""

    @wraps(kernel)
    def call(*arguments: Any) -> None:
        kernel(*arguments)
        add_call(kernel, arguments, None)

    return call


def statically_allocated(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The allocation function, in the static memory of the capture under way where there is one."""

    @wraps(allocate)
    def call(*arguments: Any) -> Tensor:
        new, capture = allocate(*arguments), _ACTIVE.capture
        return new if capture is None else capture.allocate(new)

    return call


def uncapturable(call: Callable[P, R], why: str) -> Callable[P, R]:
    """The call, which refuses to be captured, since it does not add what it calls."""

    @wraps(call)
    def refuse_and_call(*arguments: P.args, **options: P.kwargs) -> R:
        if _ACTIVE.capture is not None:
            _ACTIVE.capture.refuse(why)
        return call(*arguments, **options)

    return refuse_and_call
