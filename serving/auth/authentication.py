"""Middleware that refuses whoever has no key: at every path, known or not, but liveness and preflights."""

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from ..errors import ApiError
from .key import Key
from .keys import Keys, is_loopback

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ALWAYS_OPEN = "/health/live"


class Authentication:
    """ASGI middleware that sets scope["lamina.key"], or raises ApiError 401, 403 or 429.

    open_routes: paths besides liveness that are read (GET, HEAD) without a key, written exactly so.
    origins: whose pages may ask where there is no key, besides this machine's own; * is anybody's.
    """

    def __init__(
        self,
        app: "ASGIApp",
        keys: Keys,
        open_routes: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
    ) -> None:
        self._app = app
        self._keys = keys
        self._open = {ALWAYS_OPEN, *open_routes}
        self._origins = origins

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Serves a request whose key may ask this; no route takes a WebSocket, which is closed."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or self._needs_no_key(scope):
            scope["lamina.key"] = self._keys.anonymous
            await self._app(scope, receive, send)
            return
        if self._keys.are_open:
            self._require_trusted_page(scope)
        key = self._key(scope)
        scope["lamina.key"] = key
        key.require_route(route_path(scope))
        if scope["method"] == "POST":
            key.meter.count_request()
        await self._app(scope, receive, _with_limits(key, send))

    def _needs_no_key(self, scope: "Scope") -> bool:
        method = scope["method"]
        return method == "OPTIONS" or (method in ("GET", "HEAD") and route_path(scope) in self._open)

    def _require_trusted_page(self, scope: "Scope") -> None:
        """Raises ApiError 403 where any page of the web asks through the browser of this machine's user."""
        origin = Headers(scope=scope).get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        try:
            is_own = is_loopback(urlsplit(origin).hostname or "")
        except ValueError:
            is_own = False
        if not is_own:
            remedy = "configure API keys, or allow the origin by --cors-origins"
            message = f"pages of {origin[:100]!r} may not ask a server without keys; {remedy}"
            raise ApiError(status=403, message=message, code="origin_not_allowed")

    def _key(self, scope: "Scope") -> Key:
        secrets = list(_secrets(scope["headers"]))
        key = self._keys.find(secrets)
        if key is not None:
            return key
        challenge = 'Bearer realm="lamina"'
        if secrets:
            message, challenge = "the API key is not known", f'{challenge}, error="invalid_token"'
        else:
            message = "no API key was given; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        headers = {"WWW-Authenticate": challenge}
        raise ApiError(status=401, message=message, code="invalid_api_key", headers=headers)


def route_path(scope: "Scope") -> str:
    """Returns the path as routes see it: without the root path that a proxy adds."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if not root or not path.startswith(root):
        return path
    rest = path[len(root) :]
    return rest if rest.startswith("/") or not rest else path


def _secrets(headers: list[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Yields what a client gave for a key: as OpenAI's clients send it first, then as Anthropic's do."""
    for name, value in headers:
        scheme, _, secret = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer" and secret.strip():
            yield secret.strip()
    for name, value in headers:
        if name == b"x-api-key" and value.strip():
            yield value.strip()


def _with_limits(key: Key, send: "Send") -> "Send":
    """Returns a send that tells the limits of a key in the headers; only a key that has any pays for it."""
    limits = key.entry.limits
    if limits.requests_per_minute is None and limits.tokens_per_minute is None:
        return send

    async def limited(message: "Message") -> None:
        if message["type"] == "http.response.start":
            limits_now = [(name.encode(), value.encode()) for name, value in key.meter.headers().items()]
            message["headers"] = [*message.get("headers", ()), *limits_now]
        await send(message)

    return limited
