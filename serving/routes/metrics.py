"""GET /metrics: the server's figures for Prometheus."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..context import Serving
from ..metrics.collector import Scraped
from ..served_models import models_of


async def metrics(request: Request) -> Response:
    """Returns the figures, within about a second whatever the engine does."""
    models = models_of(request)
    scraped = [_scraped(serving) for serving in models]
    accept = request.headers.get("accept", "")
    page, content_type = await models.first.metrics_page.render(scraped, accept=accept)
    return Response(page, headers={"content-type": content_type, "cache-control": "no-store"})


def _scraped(serving: Serving) -> Scraped:
    loaded = serving.loaded
    if loaded is None:
        return Scraped(metrics=serving.metrics)
    return Scraped(metrics=serving.metrics, runtime=loaded.runtime, num_waiting=loaded.admission.num_waiting)


ROUTES: list[BaseRoute] = [Route("/metrics", metrics, methods=["GET"])]
