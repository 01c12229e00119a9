"""X-Request-Id: the client's own, or one made here, on every answer and in every line of log."""

import os

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

MAX_LENGTH = 128  # characters of a client's id that are kept


class RequestIds:
    """Puts the request's id into scope["lamina.request_id"] and on the answer.

    It is the client's X-Request-Id without what is not printable ASCII, cut to MAX_LENGTH; else a fresh one.
    Two requests may have the same.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        kept = "".join(each for each in given[:MAX_LENGTH] if "!" <= each <= "~")
        request_id = scope["lamina.request_id"] = kept or os.urandom(16).hex()
        scope["lamina.headers"].append((b"x-request-id", request_id.encode()))
        await self.app(scope, receive, send)
