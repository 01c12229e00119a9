"""CORS: which pages a browser lets read the answers, on every answer and before authentication."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

METHODS = b"GET, POST, DELETE, HEAD, OPTIONS"
EXPOSED = b"X-Request-Id, X-Lamina-Ignored-Fields, X-Lamina-Not-Enforced, Server-Timing, Retry-After"
MAX_AGE = b"600"  # seconds for which a browser keeps what a preflight was answered
ALLOWED_BEFORE = "authorization, content-type, x-request-id, x-request-timeout, x-api-key"


class Cors:
    """Adds the headers for origins that are allowed, and answers OPTIONS itself; it needs no key."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...], credentials: bool) -> None:
        self.app = app
        self.origins = frozenset(origins)
        self.credentials = credentials

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = scope["lamina.headers"]
        given = Headers(scope=scope)
        origin = given.get("origin")
        is_allowed = origin is not None and ("*" in self.origins or origin in self.origins)
        if self.origins and "*" not in self.origins:
            headers.append((b"vary", b"Origin"))
        if is_allowed:
            headers += self._for_reading(origin or "")
        if scope["method"] != "OPTIONS":
            await self.app(scope, receive, send)
            return
        if is_allowed:
            headers += _for_asking(given)
        start = [(b"allow", METHODS), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": start})
        await send({"type": "http.response.body", "body": b""})

    def _for_reading(self, origin: str) -> list[tuple[bytes, bytes]]:
        allowed = b"*" if "*" in self.origins else origin.encode("latin-1")
        headers = [(b"access-control-allow-origin", allowed), (b"access-control-expose-headers", EXPOSED)]
        if self.credentials:
            headers.append((b"access-control-allow-credentials", b"true"))
        return headers


def _for_asking(given: Headers) -> list[tuple[bytes, bytes]]:
    """What a preflight asks: any header may be sent, since each is checked or passed over."""
    asked = given.get("access-control-request-headers") or ALLOWED_BEFORE
    return [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", asked.encode("latin-1")),
        (b"access-control-max-age", MAX_AGE),
    ]
