"""Work that ends when the client that asked for it has gone."""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Receive

T = TypeVar("T")


async def while_connected(receive: "Receive", work: Coroutine[Any, Any, T]) -> T:
    """Returns what the work returns; once the client has gone it is cancelled and ApiError 499 raised.

    The body must have been read. Where work and disconnect come together, the work counts. Cancelling the
    caller cancels the work and waits for its end.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(status=499, message="the client has closed the connection")
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait((working, watching))
        for task in (working, watching):
            if not task.cancelled():
                task.exception()  # seen: nobody else asks for it
        del task, working, watching  # or an error and the frame that it came through would hold each other


async def _gone(receive: "Receive") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
