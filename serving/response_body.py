"""The body of a response that is streamed, as its connection takes it: piece by piece, without a task."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from starlette.types import Send
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

SendHead = Callable[[], Awaitable[None]]


class ResponseBody:
    """Takes a body, which begin() begins. All but end() happens at once.

    is_full: whether the client has left so much unread that it should be sent no more for now; the connection
    says so. on_writable: called when a client that was full takes more.
    """

    __slots__ = ("_cycle", "_transport", "is_full", "on_writable")

    def __init__(self, cycle: "RequestResponseCycle") -> None:
        """cycle: the response, of which uvicorn writes the head and notes the end."""
        self.on_writable: Callable[[], None] | None = None
        self.is_full = cycle.flow.write_paused
        self._cycle, self._transport = cycle, cycle.transport

    @property
    def has_whole_request(self) -> bool:
        """Whether the body of the request has been received, so that nobody need wait for it."""
        return not self._cycle.more_body

    def begin(self, send_head: SendHead, data: bytes) -> None:
        """Sends the head and the first bytes in one, to a client that is not full.

        send_head: sends the response's head through all layers.
        """
        transport, written = self._transport, _Written()
        self._cycle.transport = self._transport = cast(asyncio.Transport, written)
        try:
            _run_at_once(send_head())
            self.write(data)
        finally:
            self._cycle.transport = self._transport = transport
        if written.data:
            transport.write(written.data)

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


class _Written:
    """Stands in for a connection while the beginning of a response is written, and keeps it."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def _run_at_once(sending: Awaitable[None]) -> None:
    """Runs what waits for nothing, as sending does to a client that is not full, in this turn of the loop."""
    try:
        next(sending.__await__())
    except StopIteration:
        return
    raise RuntimeError("the head of a response was to be sent at once, and something in between waits")


class SentBody:
    """The same for who has no connection but ASGI's send(), which may take its time: a task sends."""

    has_whole_request = False  # as far as is known
    MOST_HELD = 65536  # bytes that are held before the client counts as full

    __slots__ = ("_held", "_num_held", "_send", "_send_head", "_sending", "is_full", "on_writable")

    def __init__(self, send: "Send") -> None:
        self.on_writable: Callable[[], None] | None = None
        self.is_full = False
        self._send = send
        self._send_head: SendHead | None = None  # what is to be sent before anything else
        self._held: list[bytes] = []
        self._num_held = 0
        self._sending: asyncio.Task[None] | None = None

    def begin(self, send_head: SendHead, data: bytes) -> None:
        """See ResponseBody."""
        self._send_head = send_head
        self.write(data)

    def write(self, data: bytes) -> None:
        """See ResponseBody."""
        self._held.append(data)
        self._num_held += len(data)
        self.is_full = self._num_held > self.MOST_HELD
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_held())

    async def end(self, data: bytes) -> None:
        """See ResponseBody."""
        if self._sending is not None:
            await self._sending
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def abort(self) -> None:
        """Sends nothing more: the response stays without its end."""
        self._held.clear()
        if self._sending is not None:
            self._sending.cancel()

    async def _send_held(self) -> None:
        send_head, self._send_head = self._send_head, None
        if send_head is not None:
            await send_head()
        while self._held:
            data, num_sent = b"".join(self._held), self._num_held
            self._held.clear()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._num_held -= num_sent
            was_full, self.is_full = self.is_full, False
            if was_full and self.on_writable is not None:
                self.on_writable()
