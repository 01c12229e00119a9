"""Every request is timed, counted by route and status, logged and traced as configured."""

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from ..metrics.record import RequestRecord

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ..metrics.metrics import Metrics


class Observation:
    """ASGI middleware outside of the one that answers errors, so that it sees their status."""

    def __init__(self, app: "ASGIApp", metrics: "Metrics") -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Serves the request with its record in scope["lamina.record"]."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(metrics=self._metrics)
        scope["lamina.record"] = record

        def noted(message: "Message") -> Awaitable[None]:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if record.finished:  # answered as a whole
                    header = (b"server-timing", record.server_timing().encode())
                    message["headers"] = [*message.get("headers", ()), header]
            return send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._metrics.answered(route_of(scope), record.status or 499)
            record.end()


def route_of(scope: "Scope") -> str:
    """Returns the template of the route that served a request, as /v1/models/{id}; "unmatched" for none."""
    endpoint = scope.get("endpoint")
    router = scope.get("router")
    for route in router.routes if router is not None and endpoint is not None else ():
        if getattr(route, "endpoint", None) is endpoint:
            return str(route.path)
    return "unmatched"
