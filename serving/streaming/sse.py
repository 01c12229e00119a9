"""Answers as server-sent events: merged for who reads slowly, ended for who has gone."""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...common.logging import get_logger
from ...runtime.engine.outputs import StreamDelta
from ..admission.connection import while_connected
from ..config import ServeConfig
from ..errors import ApiError, api_error
from .running import Running

logger = get_logger("serving")
Interrupt = Callable[[Exception], None]

COMMENT = b": keep-alive\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect them
}


class Events(Protocol):
    """How one endpoint writes its stream; each method returns whole events, b"" for none."""

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
        writer = _Writer(functools.partial(send, start), scope.get("lamina.send", send), self._running)
        try:
            await while_connected(receive, self._stream(writer))
        except ApiError as error:
            if error.status != 499 or not writer.is_started:
                raise
            logger.debug("a stream ended early: %s", error.message)
            await _hang_up(scope)
        finally:
            await self._running.aclose()

    async def _stream(self, writer: "_Writer") -> None:
        try:
            with _interruptible() as interrupt:
                writer.watch(self._config, interrupt)
                await self._write(writer)
        finally:
            writer.close()

    async def _write(self, writer: "_Writer") -> None:
        read, events = self._running.read, self._events
        try:
            while deltas := await read():
                if data := events.write(deltas):
                    await writer.send(data)
            await writer.send(events.end(), more=False)
        except Exception as error:
            if not writer.is_started:
                raise
            answer = api_error(error)
            if answer.status == 500:
                logger.warning("a stream ended by an error", exc_info=error)
            await writer.send(events.fail(answer), more=False)


async def _hang_up(scope: Scope) -> None:
    """Drops the connection with what is unsent: to close it would wait for who does not read."""
    if abort := scope.get("lamina.abort"):
        abort()
        await asyncio.sleep(0)  # until the protocol has learnt of it


@contextlib.contextmanager
def _interruptible() -> Iterator[Interrupt]:
    """Yields a function by which anything in this loop ends the block: it raises the error given there.

    A cancellation of the task from elsewhere stays one.
    """
    task = asyncio.current_task()
    assert task is not None, "outside of a task"
    reasons: list[Exception] = []

    def interrupt(reason: Exception) -> None:
        if task is not None and not reasons:
            reasons.append(reason)
            task.cancel()

    try:
        yield interrupt
    except asyncio.CancelledError:
        if reasons and task.uncancel() == 0:
            raise reasons.pop() from None
        raise
    finally:
        task = None  # it keeps its error, whose traceback would keep it, and all that the stream held


class _Writer:
    """Sends events, keeps an idle connection alive, and interrupts the stream of a client that does not read.

    uvicorn's send() waits while its buffer is full, so a timer looks at how long that takes, and nothing is
    done for each event.
    """

    def __init__(self, start: Callable[[], Awaitable[None]], send: Send, running: Running) -> None:
        """start: sends the head of the response. send: for its body, by the shortest way."""
        self.is_started = False
        self._start, self._send, self._running = start, send, running
        self._time = asyncio.get_running_loop().time
        self._sending_since: float | None = None
        self._last_sent = self._time()
        self._num_bytes = 0  # sent so far
        self._stuck = (0.0, 0)  # since when what is being sent waits, and the tokens that there were then
        self._comment: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, data: bytes, more: bool = True) -> None:
        """Sends events, preceded by the response's head where they are the first."""
        comment = self._comment
        if comment is not None and comment is not asyncio.current_task():
            await comment
            self._comment = None
        now = self._sending_since = self._time()
        if not self.is_started:
            self.is_started = True
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending_since, self._last_sent = None, now
        self._num_bytes += len(data)

    def watch(self, config: ServeConfig, interrupt: Interrupt) -> None:
        """Looks after the stream, now and four times in the shorter of its two times, until close()."""
        now, since = self._time(), self._sending_since
        if since is None:
            is_idle = self._comment is None or self._comment.done()
            if is_idle and now - self._last_sent >= config.comment_interval:
                self._comment = asyncio.create_task(self.send(COMMENT))
        elif now - since >= config.send_timeout:
            interrupt(ApiError(status=499, message=f"the client read nothing for {config.send_timeout:g} s"))
        elif self._num_unsent(since) > config.max_unsent_bytes:
            message = f"the client left {config.max_unsent_bytes} bytes unread"
            interrupt(ApiError(status=499, message=message))
        again = min(config.comment_interval, config.send_timeout) / 4
        self._timer = asyncio.get_running_loop().call_later(again, self.watch, config, interrupt)

    def close(self) -> None:
        """Stops looking after it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _num_unsent(self, since: float) -> float:
        """Returns about how many bytes have piled up since, by the mean of what a token took before."""
        num_tokens = self._running.num_output_tokens
        if self._stuck[0] != since:
            self._stuck = since, num_tokens
        before = self._stuck[1]
        return (num_tokens - before) * self._num_bytes / max(before, 1)
