"""The layer around all that may fail: every error gets the one shape, and every answer its common headers."""

import asyncio
import contextlib

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...common.logging import get_logger
from ..auth.authentication import route_path
from ..errors import ApiError, api_error
from ..metrics.record import RequestRecord

logger = get_logger("serving")

LINGER = 1.0  # seconds


class ErrorHandling:
    """Answers what the layers inside raise, and adds scope["lamina.headers"] to the start of each response.

    Layers and handlers append (name, value) pairs of bytes to that list rather than wrap send: one wrapper
    in all.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: list[tuple[bytes, bytes]] = []
        scope["lamina.headers"] = headers
        record: RequestRecord = scope["lamina.record"]
        is_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers, *record.headers()]
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except Exception as error:
            if is_started:
                logger.error("%s failed in its answer", scope["lamina.request_id"], exc_info=error)
                raise  # the connection is closed: what was sent is all there is
            if isinstance(error, HTTPException):
                error = _refusal(error, scope)
            await answer_error(error, scope, receive, send_with_headers)


async def answer_error(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error in OpenAI's shape or Anthropic's; what nobody expected is logged with its traceback."""
    answer = api_error(error)
    scope["lamina.record"].code = answer.code
    body = answer.body(route_path(scope))
    if answer.code == "internal_error":
        logger.error("%s failed", scope.get("lamina.request_id", "a request"), exc_info=error)
    if answer.headers.get("Connection") == "close":
        await _pass_over_body(receive)
    await send({"type": "http.response.start", "status": answer.status, "headers": _headers(answer, body)})
    await send({"type": "http.response.body", "body": body})


def _refusal(error: HTTPException, scope: Scope) -> ApiError:
    """What is answered to that which Starlette raises itself: unknown paths, and methods."""
    what = {
        404: f"there is no {scope['path'][:200]!r} here",
        405: f"{scope['path'][:200]!r} does not take {scope['method']}",
    }.get(error.status_code, str(error.detail))
    return ApiError(status=error.status_code, message=what, headers=dict(error.headers or {}))


async def _pass_over_body(receive: Receive) -> None:
    """Read what a client still sends, for a short while: what is unread resets a connection that closes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while (await receive()).get("more_body"):
                pass


def _headers(answer: ApiError, body: bytes) -> list[tuple[bytes, bytes]]:
    length = str(len(body)).encode()
    own = [(name.lower().encode(), value.encode("latin-1")) for name, value in answer.headers.items()]
    return [(b"content-type", b"application/json"), (b"content-length", length), *own]
