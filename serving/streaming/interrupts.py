"""A block of a coroutine that others may end."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

Interrupt = Callable[[Exception], None]


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Yields a function by which anything in this loop ends the block: it raises the error given there.

    A cancellation of the task from elsewhere stays one.
    """
    task = asyncio.current_task()
    assert task is not None, "outside of a task"
    reasons: list[Exception] = []
    is_inside = True

    def interrupt(reason: Exception) -> None:
        if is_inside and not reasons:
            reasons.append(reason)
            task.cancel()

    try:
        yield interrupt
    except asyncio.CancelledError:
        if reasons and task.uncancel() == 0:
            raise reasons[0] from None
        raise
    finally:
        is_inside = False
