"""GET /: a page to chat with the model and watch the engine; its files lie in serving/page."""

from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

FOLDER = Path(__file__).parent.parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {"/": FOLDER / "index.html"} | {
    f"/page/{file.name}": file for file in sorted(FOLDER.iterdir()) if file.suffix in (".css", ".js")
}
PATHS = tuple(FILES)
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


def page_routes() -> list[BaseRoute]:
    """Returns the routes of the page's files, which hold no secret, so that they need no key."""
    return [_route(path, file) for path, file in FILES.items()]


def _route(path: str, file: Path) -> Route:
    answer = partial(_send, content=file.read_bytes(), media_type=TYPES[file.suffix])
    is_page = file.suffix == ".html"  # the rest is of no interest to clients of the API
    return Route(path, answer, methods=["GET"], name=file.name, include_in_schema=is_page)


ROUTES: list[BaseRoute] = []  # a server may leave the page out
