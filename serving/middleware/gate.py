"""The innermost layer: requests are taken once the model is there, and until the server drains."""

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from ..auth.authentication import route_path
from ..lifecycle import Lifecycle
from .turns import Turns

ALWAYS = ("/health", "/health/live", "/health/ready", "/metrics")  # they say themselves how things stand


class Gate:
    """Answers 503 with the reason unless requests are taken; begins them in turns, and counts them."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, always: Iterable[str] = ()) -> None:
        """always: further paths that are answered whatever the state."""
        self.app = app
        self.lifecycle = lifecycle
        self.always = {*ALWAYS, *always}
        self.turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if route_path(scope) in self.always:
            await self.app(scope, receive, send)
            return
        self.lifecycle.require_accepting()
        with self.lifecycle.running():
            await self.turns.wait()
            await self.app(scope, receive, send)
