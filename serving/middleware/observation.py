"""Every request is timed, counted by route and status, and logged and traced where that is wanted."""

from typing import TYPE_CHECKING

from ...common.logging import get_logger
from ..metrics.metrics import Metrics
from ..metrics.record import RequestRecord
from ..metrics.request_log import RequestLog
from ..metrics.tracing import Tracing

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = get_logger("serving")


class Observation:
    """ASGI middleware around the one that answers errors, which tells the record how it answered.

    metrics: those of requests that ask no model.
    """

    def __init__(
        self,
        app: "ASGIApp",
        *,
        metrics: Metrics,
        log: RequestLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._app, self._metrics = app, metrics
        self._log, self._tracing = log, tracing

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Serves the request with its record in scope["lamina.record"]."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord()
        scope["lamina.record"] = record
        try:
            await self._app(scope, receive, send)
        finally:
            self._end(scope, record)
            record.generations.clear()  # the scope stays with its connection until the next request

    def _end(self, scope: "Scope", record: RequestRecord) -> None:
        route = route_of(scope)
        chosen = scope.get("lamina.serving")  # of several models the one that was asked
        metrics = self._metrics if chosen is None else chosen.metrics
        metrics.answered(route, record.status or 499, record.code)
        try:
            if self._log is not None:
                self._log.write(scope, route, record)
            if self._tracing is not None:
                self._tracing.trace(scope, route, record)
        except Exception:  # the client has its answer, whatever becomes of a line of log
            logger.exception("a request could not be logged or traced")


def route_of(scope: "Scope") -> str:
    """Returns the template of the route that served a request, as /v1/models/{id}; "unmatched" for none."""
    endpoint, router = scope.get("endpoint"), scope.get("router")
    for route in router.routes if router is not None and endpoint is not None else ():
        if getattr(route, "endpoint", None) is endpoint:
            return str(route.path)
    return "unmatched"
