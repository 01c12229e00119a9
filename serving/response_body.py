"""The body of a response that is streamed, as its connection takes it: piece by piece, without a task."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class ResponseBody:
    """Takes a body once its response has begun. All but end() happens at once.

    is_full: whether the client has left so much unread that it should be sent no more for now; the connection
    says so. on_writable: called when a client that was full takes more.
    """

    __slots__ = ("_cycle", "_transport", "is_full", "on_writable")

    def __init__(self, cycle: "RequestResponseCycle") -> None:
        """cycle: the response, of which uvicorn writes the head and notes the end."""
        self.on_writable: Callable[[], None] | None = None
        self.is_full = cycle.flow.write_paused
        self._cycle, self._transport = cycle, cycle.transport

    def write(self, data: bytes) -> None:
        """Sends some bytes, or keeps them for a client that is full; one that has gone is sent none."""
        if self._cycle.disconnected:
            return
        if self._cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._transport.write(data)

    async def end(self, data: bytes) -> None:
        """Sends the last bytes, once the client is not full."""
        await self._cycle.send({"type": "http.response.body", "body": data, "more_body": False})

    def abort(self) -> None:
        """Drops the connection with what is unsent."""
        self._transport.abort()
