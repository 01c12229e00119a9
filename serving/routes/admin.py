"""What those who run a server ask of it: POST /sleep, /wake_up and /update_weights, GET /is_sleeping."""

from collections.abc import Awaitable
from dataclasses import replace

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ...common.errors import ConfigError, GroupError, LoadError, shown
from ..auth.key import key_of
from ..context import Serving, serving_of
from ..errors import ApiError
from ..middleware.body import read_body
from ..protocol.admin import UpdateWeightsRequest
from ..protocol.decoding import decode_async, wrong

LEVELS = {"1": 1, "2": 2}


async def sleep(request: Request) -> Response:
    """Gives the device's memory back: ?level=1 keeps the weights on the host, 2 drops them; requests wait.

    Answers {"is_sleeping": true} once it is given back. Needs an admin key.
    """
    serving = _administered(request, "level")
    given = request.query_params.get("level", "1")
    if given not in LEVELS:
        raise wrong("level", f"level is {shown(given)}; wanted 1 or 2")
    await serving.runtime.sleep(LEVELS[given])
    return JSONResponse({"is_sleeping": True})


async def wake_up(request: Request) -> Response:
    """Takes the memory again, and answers {"is_sleeping": false} once requests go on. Needs an admin key."""
    await _done(_administered(request).runtime.wake())
    return JSONResponse({"is_sleeping": False})


async def is_sleeping(request: Request) -> Response:
    """Answers {"is_sleeping": …}. Needs an admin key."""
    return JSONResponse({"is_sleeping": await _administered(request).runtime.is_sleeping()})


async def update_weights(request: Request) -> Response:
    """Replaces the weights by those of a folder or of a group, all or nothing; needs an admin key.

    Answers {"system_fingerprint": …} once they are used. What is being written goes on with them.
    """
    serving = _administered(request)
    decoded = await decode_async(UpdateWeightsRequest, await read_body(request), strict=True)
    asked = decoded.request
    if (asked.folder is None) == (asked.group is None):
        raise wrong("folder", "wanted one of folder and group")
    plain = ("folder", asked.folder) if asked.group is None else ("group", asdict(asked.group))
    await _done(serving.runtime.call("update_weights", *plain))
    fingerprint = await serving.runtime.call("fingerprint")
    assert serving.loaded is not None
    serving.loaded = replace(serving.loaded, fingerprint=fingerprint)
    return JSONResponse({"system_fingerprint": fingerprint})


async def _done(work: Awaitable[None]) -> None:
    """Waits for it; what the client can put right is a 400."""
    try:
        await work
    except (ConfigError, LoadError, GroupError) as error:
        raise ApiError(status=400, message=str(error), code=type(error).__name__) from error


def _administered(request: Request, *known: str) -> Serving:
    """The server's parts, for an admin key; ApiError 403 for others, 400 for unknown parameters."""
    key_of(request).require_admin()
    for name in request.query_params:
        if name not in known:
            raise wrong(name, f"{shown(name)} is no parameter of {request.url.path}")
    return serving_of(request)


ROUTES: list[BaseRoute] = [
    Route("/sleep", sleep, methods=["POST"]),
    Route("/wake_up", wake_up, methods=["POST"]),
    Route("/is_sleeping", is_sleeping, methods=["GET"]),
    Route("/update_weights", update_weights, methods=["POST"]),
]
