"""Answers as server-sent events: merged for who reads slowly, ended for who has gone."""

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...common.logging import get_logger
from ...runtime.engine.outputs import StreamDelta
from ..admission.connection import while_connected
from ..config import ServeConfig
from ..errors import ApiError, api_error
from ..response_body import ResponseBody, SendHead, SentBody
from .running import Running

logger = get_logger("serving")

COMMENT = b": keep-alive\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect them
}
MOST_TOKENS = 256  # of a stream that are written before others have their turn
LOOKS = 4  # at whether a stream is idle, in the time after which it is


ReadText = Callable[[int], tuple[str, int] | None]
WriteText = Callable[[str, int], bytes]


class Events(Protocol):
    """How one endpoint writes its stream; each method returns whole events, b"" for none."""

    write_text: WriteText | None
    """Writes text of so many tokens of the only answer, of which write() has written the beginning.

    None where a text is not written by itself, whatever stands around it.
    """

    def write(self, deltas: list[StreamDelta]) -> bytes:
        """What is new."""

    def end(self) -> bytes:
        """What follows the last delta."""

    def fail(self, error: ApiError) -> bytes:
        """What takes the place of all that would follow."""


class EventStream(Response):
    """A stream of events. An error before the first of them is raised, so that it is answered by a status."""

    def __init__(
        self,
        running: Running,
        events: Events,
        config: ServeConfig,
        headers: Mapping[str, str],
    ) -> None:
        """running: ended when the stream ends, however that is. config: has the bounds of a stream."""
        self.status_code = 200
        self.background = None
        self.init_headers({**headers, **HEADERS})
        self._running, self._events, self._config = running, events, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the stream; returns when it is written, or its client has gone or does not read."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        body: ResponseBody | SentBody = scope["lamina.body"]
        stream = _Stream(self._running, self._events, self._config, body)
        try:
            await while_connected(receive, stream.run(functools.partial(send, start)))
        except ApiError as error:
            if error.status != 499 or not stream.is_started:
                raise
            logger.debug("a stream ended early: %s", error.message)
            body.abort()  # to close it would wait for who does not read
            await asyncio.sleep(0)  # until the protocol has learnt of it
        finally:
            await self._running.aclose()


class _Stream:
    """One stream while it is written. Its task sends the end.

    What comes before is written by whoever brings news, in one call a step: no task is woken for a token, and
    the first goes with the head.
    Mostly that is text of an answer that has begun and goes on, for which there is a shorter way.
    """

    __slots__ = (
        *("is_started", "_running", "_events", "_config", "_body", "_loop", "_send_head", "_over", "_text"),
        *("_num_bytes", "_num_tokens_when_full", "_num_bytes_seen", "_num_idle", "_timer", "_rest"),
    )

    def __init__(
        self, running: Running, events: Events, config: ServeConfig, body: ResponseBody | SentBody
    ) -> None:
        self.is_started = False
        self._running, self._events, self._config, self._body = running, events, config, body
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()  # once all is written, or by an error
        self._num_bytes = 0  # of events so far
        self._num_tokens_when_full: int | None = None
        self._num_bytes_seen, self._num_idle = 0, 0  # by the timer, and how often it has seen as many
        self._rest: asyncio.Handle | None = None  # the turn in which more is written
        self._text: tuple[ReadText, WriteText] | None = None  # the shorter way, where there is one

    async def run(self, send_head: SendHead) -> None:
        """Returns when all is sent; raises what ends it before that, or if its client does not read.

        send_head: sends the response's head.
        """
        self._send_head = send_head
        self._running.notify(self._write_news)
        self._body.on_writable = self._go_on
        self._timer = self._loop.call_later(self._config.comment_interval, self._begin_idle)
        try:
            self._write_news()
            last = await self._last()
            if not self.is_started:
                await send_head()
            await self._body.end(last)
        finally:
            self._running.notify(None)
            self._body.on_writable = None
            for handle in (self._timer, self._rest):
                if handle is not None:
                    handle.cancel()
            if self._over.done() and not self._over.cancelled():
                self._over.exception()  # seen: it may have come as nobody waited any more

    async def _last(self) -> bytes:
        try:
            await self._over
            return self._events.end()
        except Exception as error:
            answer = api_error(error)
            if answer.status == 499 or not self.is_started:
                raise
            if answer.status == 500:
                logger.warning("a stream ended by an error", exc_info=error)
            return self._events.fail(answer)

    def _write_news(self) -> None:
        """Writes what is new, unless the client is to read first: then it waits, and is merged."""
        try:
            if self._body.is_full or not self._write_text():
                self._write_others()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._text = None
        if not self._over.done():
            self._over.set_exception(error)

    def _write_text(self) -> bool:
        """Writes new text where there is nothing else to say: the shortest way, of most tokens."""
        if self._text is None:
            return False
        read, write = self._text
        found = read(MOST_TOKENS)
        if found is None:
            return False
        if data := write(*found):
            self._num_bytes += len(data)
            self._body.write(data)
        return True

    def _write_others(self) -> None:
        if self._rest is not None or self._over.done():
            return
        if self._body.is_full:
            self._check_unsent()
            return
        deltas = self._running.read_nowait(MOST_TOKENS)
        if deltas and (data := self._events.write(deltas)):
            self._write(data)
        if self._running.is_read:
            self._running.read_nowait(MOST_TOKENS)  # raises what ended it
            self._over.set_result(None)
        elif _num_tokens(deltas) >= MOST_TOKENS:
            self._rest = self._loop.call_soon(self._write_rest)

    def _write_rest(self) -> None:
        self._rest = None
        self._write_news()

    def _write(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self.is_started:
            self._body.write(data)
        else:
            self._begin(data)

    def _begin(self, data: bytes) -> None:
        """Sends the head, and what follows it."""
        self._body.begin(self._send_head, data)
        self.is_started = True
        reader, write_text = self._running.only_reader, self._events.write_text
        if reader is not None and write_text is not None:
            self._text = reader.read_text, write_text
        self._timer.cancel()
        self._watch()

    def _begin_idle(self) -> None:
        """Begins with a comment, as there has been nothing else for long, once the client is not full."""
        if self._body.is_full:
            self._timer = self._loop.call_later(self._config.comment_interval, self._begin_idle)
            return
        try:
            self._begin(COMMENT)
        except Exception as error:
            self._fail(error)

    def _go_on(self) -> None:
        """The client takes more."""
        self._num_tokens_when_full = None
        self._write_news()

    def _check_unsent(self) -> None:
        """ApiError where too much waits for the client, by the mean of what a token took before."""
        num_tokens, most = self._running.num_output_tokens, self._config.max_unsent_bytes
        if self._num_tokens_when_full is None:
            self._num_tokens_when_full = num_tokens
        num_before = self._num_tokens_when_full
        if (num_tokens - num_before) * self._num_bytes > most * max(num_before, 1):
            raise ApiError(status=499, message=f"the client left {most} bytes unread")

    def _watch(self) -> None:
        """Sends a comment where nothing was sent for long, and looks again."""
        if self._num_bytes != self._num_bytes_seen or self._body.is_full:
            self._num_bytes_seen, self._num_idle = self._num_bytes, 0
        else:
            self._num_idle += 1
            if self._num_idle >= LOOKS:
                self._num_idle = 0
                self._body.write(COMMENT)
        self._timer = self._loop.call_later(self._config.comment_interval / LOOKS, self._watch)


def _num_tokens(deltas: list[StreamDelta]) -> int:
    num = 0
    for delta in deltas:  # mostly one
        num += len(delta.token_ids)
    return num
