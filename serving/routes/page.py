"""GET /: a page to chat with the model and watch the engine; its files lie in serving/page."""

from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

FOLDER = Path(__file__).parent.parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# Nothing but the page's own files runs or is asked, and no other site may frame it.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def _send(_request: Request, *, content: bytes, media_type: str) -> Response:
    return Response(content, media_type=media_type, headers=HEADERS)


def _route(path: str, file: Path) -> Route:
    answer = partial(_send, content=file.read_bytes(), media_type=TYPES[file.suffix])
    return Route(path, answer, methods=["GET"], name=file.name)


def page_routes() -> list[BaseRoute]:
    """Returns the page's own routes, which hold no secret and need no key; a server may leave them out."""
    files = sorted(file for file in FOLDER.iterdir() if file.suffix in (".css", ".js"))
    return [_route("/", FOLDER / "index.html"), *(_route(f"/page/{file.name}", file) for file in files)]


ROUTES = page_routes()
