"""What ends a response early: its client going away, or not reading."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.types import Receive

from ..errors import ApiError

Interrupt = Callable[[Exception], None]


def client_gone() -> ApiError:
    """What ends a request whose client has closed the connection; nobody reads it but logs and metrics."""
    return ApiError(status=499, message="the client closed the connection before the answer was whole")


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


@contextlib.asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[Interrupt]:
    """Ends the block by client_gone() once the client has gone; the body of its request has been read."""
    with interruptible() as interrupt:
        watcher = asyncio.create_task(_disconnect(receive))
        watcher.add_done_callback(lambda task: task.cancelled() or interrupt(client_gone()))
        try:
            yield interrupt
        finally:
            watcher.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
