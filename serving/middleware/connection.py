"""A client's connection: uvicorn's protocol, with bounds on what it does not bound."""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from ..config import ServeConfig
from ..errors import ApiError
from ..response_body import ResponseBody

MAX_HEADERS = 256
FRAMING = (b"content-length", b"transfer-encoding")
LINGER = 2.0  # seconds for a client to read why it was refused, before the connection is closed


class Connection(HttpToolsProtocol):
    """Bounds connections, the size of headers and the time they take; refuses in OpenAI's shape.

    Whenever data comes while no response is under way, headers have to be whole within header_timeout: that
    is so for the first request, for the next, and for a body that goes on after its answer.
    """

    def __init__(self, *, limits: ServeConfig, max_connections: int, **given: Any) -> None:
        super().__init__(**given)
        self.limits, self.max_connections = limits, max_connections
        self.is_refused = False
        self._in_headers = False
        self._is_resuming = False  # whether the parser reads again how a body is framed
        self._num_bytes = 0  # of the message that is being read, but for its body
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._body: ResponseBody | None = None  # of what is running

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or refuse one connection too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            message = f"the server has {self.max_connections} connections; try again later"
            self._refuse(ApiError(status=503, message=message, headers={"Retry-After": "2"}))
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the response under way; uvicorn tells the last request, which may wait behind it."""
        self._clear_deadline()
        self._stop_watching()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for a client that takes less than it is sent, while it takes something in send_timeout."""
        super().pause_writing()
        if self._body is not None:
            self._body.is_full = True
        self._watch_reading()

    def resume_writing(self) -> None:
        """Go on with a client that has taken what it was sent."""
        super().resume_writing()
        self._stop_watching()
        if self._body is not None:
            self._body.is_full = False
            if self._body.on_writable is not None:
                self._body.on_writable()

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the client was refused: then it is passed over."""
        if self.is_refused:
            return
        self._unset_keepalive_if_required()
        self._num_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(_refusal_of(error))
            return
        if self._num_bytes > self._max_bytes():
            self._refuse(_too_large(self.limits))
            return
        if self._running is None or self._running.response_complete:
            self._expect_headers()

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._is_resuming:
            return
        super().on_message_begin()
        self._in_headers = True

    def on_url(self, url: bytes) -> None:
        """Take the target, or a part of it."""
        if not self._is_resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; what trails a body is passed over, as its request has begun."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind the one under way."""
        if self._is_resuming:
            return
        self._in_headers = False
        num_bytes = len(self.url) + 4 * len(self.headers)
        for name, value in self.headers:
            num_bytes += len(name) + len(value)
        if num_bytes > self.limits.max_header_bytes or len(self.headers) > MAX_HEADERS:
            raise _too_large(self.limits)
        _check_head(self.parser, self.headers)
        self._clear_deadline()
        super().on_headers_complete()
        if self.expect_100_continue:
            self.cycle.keep_alive = False  # who is refused before sends no body, and nothing says so
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _Unchunked(self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is whole; behind an offer of another protocol it is still to be read."""
        if not self.parser.should_upgrade():
            self._num_bytes = 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the next request; what is unsent of this answer is looked after."""
        super().on_response_complete()
        if self._reading is None and self.transport.get_write_buffer_size():
            self._watch_reading()

    def _parse(self, data: bytes) -> None:
        """Parses what came; behind an offer of another protocol the parser would read no more."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
            self._read_on()

    def _read_on(self) -> None:
        """Passes an offer over: a new parser is told how the body behind these headers is framed."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        framing = [b"%s: %s\r\n" % header for header in self.headers if header[0] in FRAMING]
        self._is_resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self._is_resuming = False

    def _max_bytes(self) -> int:
        most = self.limits.max_header_bytes
        return most if self._in_headers else most + self.limits.max_body_bytes

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Begin a request, whose response finds its ResponseBody in scope["lamina.body"]."""
        self._running, self._body = cycle, ResponseBody(cycle)
        cycle.scope["lamina.body"] = self._body  # type: ignore[typeddict-unknown-key]
        super()._start_asgi_task(cycle, app)

    def _watch_reading(self, num_before: int | None = None) -> None:
        """Drops the connection where no fewer bytes are unsent than before; whole answers lie there, too."""
        num_unsent = self.transport.get_write_buffer_size()
        self._reading = None
        if num_before is not None and num_unsent >= num_before:
            self.transport.abort()
        elif num_unsent:
            self._reading = self.loop.call_later(self.limits.send_timeout, self._watch_reading, num_unsent)

    def _stop_watching(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _expect_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.limits.header_timeout, self._end_slow)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_slow(self) -> None:
        self._deadline = None
        if self._in_headers:
            message = f"the headers were not whole after {self.limits.header_timeout:g} s"
            self._refuse(ApiError(status=408, message=message))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request that can be served, pass over what follows, and close soon."""
        self.is_refused = True
        self._clear_deadline()
        self.pipeline.clear()
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            running.keep_alive = False  # its answer comes to its end first
            return
        if running is not None:
            running.disconnected = True
            running.message_event.set()
        self.transport.write(_response(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER, self.transport.close)


def _check_head(parser: Any, headers: list[tuple[bytes, bytes]]) -> None:
    """Raises ApiError for what proxies and servers could read in two ways."""
    version, names = parser.get_http_version(), [name for name, _ in headers]
    wrong = None
    if version not in ("1.0", "1.1"):
        wrong = f"the version is HTTP/{version}; wanted HTTP/1.1"
    elif parser.get_method() == b"CONNECT":
        wrong = "the method is CONNECT, which only proxies serve"
    elif (count := names.count(b"host")) > 1 or (not count and version == "1.1"):
        wrong = f"there are {count} host headers; wanted one"
    elif any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in headers):
        wrong = "the transfer-encoding is not chunked, the only one that is read"
    if wrong is not None:
        raise ApiError(status=400, message=wrong, code="invalid_http")


def _response(error: ApiError) -> bytes:
    body = error.body()
    headers = {**error.headers, "Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = "".join(f"{name.lower()}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[error.status] + lines.encode("latin-1") + b"connection: close\r\n\r\n" + body


def _refusal_of(error: Exception) -> ApiError:
    """What a parser's error is answered; one of ours raised inside of it stays what it is."""
    cause = error.__context__
    if isinstance(cause, ApiError):
        return cause
    return ApiError(status=400, message="this is no valid HTTP/1.1 request", code="invalid_http")


def _too_large(limits: ServeConfig) -> ApiError:
    wanted = f"wanted at most {limits.max_header_bytes} bytes and {MAX_HEADERS} headers"
    return ApiError(status=431, message=f"the request's headers are too large; {wanted}")


class _Unchunked:
    """Sends to a client of HTTP/1.0, which knows no chunks: a connection's end is that of its body."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        self.has_length = True

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            self.cycle.chunked_encoding = None if self.has_length else False
        elif not self.has_length:
            self.cycle.expected_content_length = len(message.get("body", b""))
        await RequestResponseCycle.send(self.cycle, message)
