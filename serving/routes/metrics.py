"""GET /metrics: the server's figures for Prometheus."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..context import serving_of


async def metrics(request: Request) -> Response:
    """Returns the figures, within about a second whatever the engine does."""
    serving = serving_of(request)
    loaded, accept = serving.loaded, request.headers.get("accept", "")
    page, content_type = await serving.metrics_page.render(
        None if loaded is None else loaded.runtime,
        num_waiting=0 if loaded is None else loaded.admission.num_waiting,
        accept=accept,
    )
    return Response(page, headers={"content-type": content_type, "cache-control": "no-store"})


ROUTES: list[BaseRoute] = [Route("/metrics", metrics, methods=["GET"])]
