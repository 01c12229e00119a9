"""GET /version: which Lamina this is."""

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ... import __version__


async def version(request: Request) -> JSONResponse:
    """Answers {"version": …}."""
    return JSONResponse({"version": __version__})


ROUTES = [Route("/version", version)]
