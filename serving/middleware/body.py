"""Bodies of requests: JSON in UTF-8, no longer and no slower than allowed."""

import asyncio

from starlette.requests import Request

from ..config import ServeConfig
from ..context import serving_of
from ..errors import ApiError

BYTES_PER_SECOND = 65536  # by which the time for a body grows


async def read_body(request: Request) -> bytes:
    """Returns the body of a request.

    Raises ApiError: 415 for a content type other than JSON (none at all is accepted), 413 for more than
    config.max_body_bytes, 408 for a body that arrives too slowly, 400 for one that ends early or is no UTF-8.
    """
    config = serving_of(request).config
    _check_type(request)
    _check_size(int(request.headers.get("content-length", 0)), config.max_body_bytes)
    if request.scope["lamina.body"].has_whole_request:
        message = await request.receive()
        if message["type"] != "http.request":
            raise _ended_early()
        body = message["body"]
        _check_size(len(body), config.max_body_bytes)
    else:
        body = await _received(request, config)
    return _checked_text(body)


async def _received(request: Request, config: ServeConfig) -> bytes:
    """Waits for a body that is still to come."""
    body = bytearray()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(config.body_timeout) as limit:
            deadline = loop.time() + config.body_timeout
            while (message := await request.receive())["type"] == "http.request":
                body += message.get("body", b"")
                _check_size(len(body), config.max_body_bytes)
                if not message.get("more_body"):
                    return bytes(body)
                limit.reschedule(deadline + len(body) / BYTES_PER_SECOND)
    except TimeoutError:
        got = f"the body has {len(body)} bytes after {config.body_timeout:g} s or more"
        raise ApiError(status=408, message=f"{got}; wanted all of it sooner") from None
    raise _ended_early()


def _ended_early() -> ApiError:
    return ApiError(status=400, message="the body ended early; wanted as much as its headers say")


def _check_type(request: Request) -> None:
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        message = f"content-encoding is {coding[:80]!r}; wanted the body as it is"
        raise ApiError(status=415, message=message)
    kind = request.headers.get("content-type")
    if kind is None:
        return
    media, _, parameters = kind.partition(";")
    media = media.strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        message = f"content-type is {media[:80]!r}; wanted application/json"
        raise ApiError(status=415, message=message)
    named = (each.partition("=") for each in parameters.lower().split(";"))
    charset = next((value.strip(' "') for name, _, value in named if name.strip() == "charset"), "")
    if charset not in ("", "utf-8", "utf8"):
        message = f"the content-type's charset is {charset[:80]!r}; wanted utf-8"
        raise ApiError(status=415, message=message)


def _check_size(num_bytes: int, most: int) -> None:
    if num_bytes > most:
        message = f"the body has {num_bytes} bytes or more; wanted at most {most}"
        raise ApiError(status=413, message=message, code="request_too_large")


def _checked_text(body: bytes) -> bytes:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        message = f"the body's byte {error.start} is no UTF-8; wanted JSON in UTF-8"
        raise ApiError(status=400, message=message) from None
    return body
