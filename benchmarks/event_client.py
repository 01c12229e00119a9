"""A client of event streams that costs little, as its time is measured along with that of the server."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import httptools

T = TypeVar("T")
SECONDS_TO_CONNECT = 60
SECONDS_TO_ANSWER = 3600  # all of it
END = b"[DONE]"
OnEvent = Callable[[bytes, float], None]  # its data, and when it came by time.monotonic()


class Connection(asyncio.Protocol):
    """One connection to a server, kept open: a request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._ended: asyncio.Future[int] | None = None  # of the answer that is read: its status
        self._on_event: OnEvent | None = None
        self._body = bytearray()  # what is no whole event yet
        self._now = 0.0

    async def ask(self, request: bytes, on_event: OnEvent | None = None) -> tuple[int, bytes]:
        """Returns status and body of the answer; of a stream the body is given to on_event event by event.

        Raises ConnectionError where it ends early, TimeoutError where it does not end.
        """
        assert self._transport is not None, "not connected"
        self._parser = httptools.HttpResponseParser(self)
        self._ended, self._on_event = asyncio.get_running_loop().create_future(), on_event
        self._body.clear()
        self._transport.write(request)
        async with asyncio.timeout(SECONDS_TO_ANSWER):
            return await self._ended, bytes(self._body)

    def close(self) -> None:
        """Drops it, and what is unread."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It can be asked."""
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def connection_lost(self, exc: Exception | None) -> None:
        """It cannot be asked any more."""
        self.is_open = False
        self._fail(exc or ConnectionError("the connection was closed before the answer had ended"))

    def data_received(self, data: bytes) -> None:
        """Read on."""
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is no HTTP: {error}"))

    # What the parser calls.

    def on_headers_complete(self) -> None:
        """Of what is no stream the body is kept whole."""
        if self._parser.get_status_code() != 200:
            self._on_event = None

    def on_body(self, body: bytes) -> None:
        """Tell the events that are whole."""
        self._body += body
        if self._on_event is None:
            return
        *lines, rest = self._body.split(b"\n")
        self._body = rest
        for line in lines:
            if line.startswith(b"data: ") and line.strip() != b"data: " + END:
                self._on_event(bytes(line[6:]), self._now)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self.is_open = self.is_open and self._parser.should_keep_alive()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(self._parser.get_status_code())

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


class Server:
    """A server by its address, with the connections to it that nobody uses."""

    def __init__(self, base_url: str, api_key: str) -> None:
        """base_url: as OpenAI's clients have it, http://host:port/v1."""
        parts = urlsplit(base_url)
        if parts.hostname is None or parts.scheme not in ("http", "https"):
            raise SystemExit(f"base_url is {base_url!r}; wanted one such as http://127.0.0.1:8000/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._address = parts.hostname, parts.port or (443 if self._tls else 80)
        self._path, self._idle = parts.path.rstrip("/"), list[Connection]()
        self._headers = f"Host: {parts.netloc}\r\nAuthorization: Bearer {api_key}\r\n"

    async def get(self, path: str) -> Any:
        """Returns the JSON that stands there; ConnectionError for any status but 200."""
        status, body = await self.ask(f"GET {self._path}{path} HTTP/1.1\r\n{self._headers}\r\n".encode())
        if status != 200:
            raise ConnectionError(f"{self._path}{path}: {status}: {body[:200].decode(errors='replace')}")
        return json.loads(body)

    def post(self, path: str, value: Any) -> bytes:
        """Returns a request as its bytes."""
        body = json.dumps(value).encode()
        framing = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}{framing}".encode() + body

    async def ask(self, request: bytes, on_event: OnEvent | None = None) -> tuple[int, bytes]:
        """As Connection has it, by one that is free."""
        async with self.connection() as connection:
            return await connection.ask(request, on_event)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Yields a connection that nobody else uses: one that is open, else a new one."""
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await self._connected()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)

    async def _connected(self) -> Connection:
        async with asyncio.timeout(SECONDS_TO_CONNECT):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, *self._address, ssl=self._tls)
        return connection

    def close(self) -> None:
        """Closes what is open."""
        for connection in self._idle:
            connection.close()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Returns what it returns, in the event loop that costs least of those that there are."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
