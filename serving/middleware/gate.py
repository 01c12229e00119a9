"""The innermost layer: requests are taken once the model is there, and until the server drains."""

from starlette.types import ASGIApp, Receive, Scope, Send

from ..lifecycle import Lifecycle

ALWAYS = ("/health", "/health/live", "/health/ready")  # they say themselves how things stand
ONCE_LOADED = ("/metrics",)


class Gate:
    """Answers 503 with the reason unless requests are taken, and counts the responses under way."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self.app = app
        self.lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        is_watching = path in ALWAYS or (path in ONCE_LOADED and self.lifecycle.state != "starting")
        if is_watching:
            await self.app(scope, receive, send)
            return
        self.lifecycle.require_accepting()
        with self.lifecycle.running():
            await self.app(scope, receive, send)


def route_path(scope: Scope) -> str:
    """Returns the path below the root path, by which routes are found."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
