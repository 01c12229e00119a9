"""What those who run a server ask of it: sleep, other weights, and which engines take requests.

Each takes ?model=, the name of one of several models; the first is meant otherwise.
"""

from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ...common.errors import ConfigError, GroupError, LoadError, shown
from ..auth.key import key_of
from ..context import Serving
from ..errors import ApiError
from ..middleware.body import read_body
from ..protocol.admin import UpdateWeightsRequest
from ..protocol.decoding import decode_async, wrong
from ..served_models import models_of
from .health import engine_report

if TYPE_CHECKING:
    from ..model_swap.swapper import Swapper

LEVELS = {"1": 1, "2": 2}


async def sleep(request: Request) -> Response:
    """Gives the device's memory back: ?level=1 keeps the weights on the host, 2 drops them; requests wait.

    Answers {"is_sleeping": true} once it is given back. Needs an admin key.
    """
    serving, swapper = _administered(request, "level")
    given = request.query_params.get("level", "1")
    if given not in LEVELS:
        raise wrong("level", f"level is {shown(given)}; wanted 1 or 2")
    if swapper is None:
        await serving.runtime.sleep(LEVELS[given])
    else:
        await swapper.hold(serving.config.model_names[0], LEVELS[given])
    return JSONResponse({"is_sleeping": True})


async def wake_up(request: Request) -> Response:
    """Takes the memory again, and answers {"is_sleeping": false} once requests go on. Needs an admin key.

    One of several models is woken in its turn.
    """
    serving, swapper = _administered(request)
    if swapper is None:
        await _done(serving.runtime.wake())
    else:
        await swapper.release(serving.config.model_names[0])
    return JSONResponse({"is_sleeping": False})


async def is_sleeping(request: Request) -> Response:
    """Answers {"is_sleeping": …}. Needs an admin key."""
    loaded = _administered(request)[0].loaded
    return JSONResponse({"is_sleeping": loaded is None or await loaded.runtime.is_sleeping()})


async def update_weights(request: Request) -> Response:
    """Replaces the weights by those of a folder or of a group, all or nothing; needs an admin key.

    Answers {"system_fingerprint": …} once they are used. What is being written goes on with them. One of
    several models is woken for it in its turn, unless it was put to sleep by POST /sleep.
    """
    serving, swapper = _administered(request)
    decoded = await decode_async(UpdateWeightsRequest, await read_body(request), strict=True)
    asked = decoded.request
    if (asked.folder is None) == (asked.group is None):
        raise wrong("folder", "wanted one of folder and group")
    if asked.model is not None:
        serving = models_of(request).find(asked.model)
    if swapper is None:
        await _update(serving, asked)
    else:
        await swapper.use(serving.config.model_names[0], partial(_update, serving, asked))
    return JSONResponse({"system_fingerprint": serving.fingerprint})


async def _update(serving: Serving, asked: UpdateWeightsRequest) -> None:
    """Replaces a model's weights, and what its answers say of them."""
    plain = ("folder", asked.folder) if asked.group is None else ("group", asdict(asked.group))
    await _done(serving.runtime.call("update_weights", *plain))
    fingerprint = await serving.runtime.call("fingerprint")
    assert serving.loaded is not None
    serving.loaded = replace(serving.loaded, fingerprint=fingerprint)


async def engines(request: Request) -> Response:
    """Answers {"engines": [{engine, state, reason, num_requests}, …]}. Needs an admin key."""
    serving, _ = _administered(request)
    return JSONResponse({"engines": [engine_report(each) for each in serving.runtime.engines()]})


async def drain(request: Request) -> Response:
    """Gives an engine no new requests, while it finishes what it has; answers how it is. Needs an admin key.

    400 for the last that takes requests, and where there is one engine.
    """
    serving, _ = _administered(request)
    engine = request.path_params["engine"]
    serving.runtime.drain_engine(engine)
    return JSONResponse(engine_report(serving.runtime.engines()[engine]))


async def resume(request: Request) -> Response:
    """Gives an engine requests again, and answers how it is. Needs an admin key."""
    serving, _ = _administered(request)
    engine = request.path_params["engine"]
    serving.runtime.resume_engine(engine)
    return JSONResponse(engine_report(serving.runtime.engines()[engine]))


async def _done(work: Awaitable[None]) -> None:
    """Waits for it; what the client can put right is a 400."""
    try:
        await work
    except (ConfigError, LoadError, GroupError) as error:
        raise ApiError(status=400, message=str(error), code=type(error).__name__) from error


def _administered(request: Request, *known: str) -> "tuple[Serving, Swapper | None]":
    """The model that ?model= names and what swaps several, for an admin key.

    ApiError 403 for other keys, 400 for unknown parameters, 404 for an unknown model.
    """
    key_of(request).require_admin()
    for name in request.query_params:
        if name not in (*known, "model"):
            raise wrong(name, f"{shown(name)} is no parameter of {request.url.path}")
    models = models_of(request)
    return models.find(request.query_params.get("model")), models.swapper


ROUTES: list[BaseRoute] = [
    Route("/sleep", sleep, methods=["POST"]),
    Route("/wake_up", wake_up, methods=["POST"]),
    Route("/is_sleeping", is_sleeping, methods=["GET"]),
    Route("/update_weights", update_weights, methods=["POST"]),
    Route("/engines", engines, methods=["GET"]),
    Route("/engines/{engine:int}/drain", drain, methods=["POST"]),
    Route("/engines/{engine:int}/resume", resume, methods=["POST"]),
]
