"""Ending a request by its id: POST /v1/requests/{id}/abort, or DELETE /v1/requests/{id}."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..auth.key import key_of
from ..errors import ApiError
from ..served_models import models_of


async def abort(request: Request) -> Response:
    """Answers {id, object, aborted}; 404 where the key that asks has no running request of this id.

    The id is that of the response, as chatcmpl-..., or the X-Request-Id of the request; it may have slashes.
    """
    request_id = request.path_params["id"]
    if not await models_of(request).abort(key_of(request), request_id):
        message = f"no request of this key runs under the id {request_id[:128]!r}"
        raise ApiError(status=404, message=message, code="request_not_found")
    return JSONResponse({"id": request_id, "object": "request", "aborted": True})


ROUTES: list[BaseRoute] = [
    Route("/v1/requests/{id:path}/abort", abort, methods=["POST"]),
    Route("/v1/requests/{id:path}", abort, methods=["DELETE"]),
]
