"""Which names the model answers to: GET /v1/models and /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..context import Serving, serving_of
from ..errors import ApiError


def require_served(serving: Serving, name: str | None) -> str:
    """Returns the name that an answer carries: the one asked by, else the server's first.

    Raises ApiError 404 model_not_found for a name that is not served.
    """
    names = serving.config.model_names
    if name is None or name in names:
        return names[0] if name is None else name
    message = f"the model `{name:.200}` does not exist here; wanted one of {', '.join(names)}"
    raise ApiError(status=404, message=message, param="model", code="model_not_found")


def model_entry(serving: Serving, name: str) -> dict[str, Any]:
    """Returns what is said about one name: all names are one model, whose root is the first of them."""
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "lamina",
        "root": serving.config.model_names[0],
        "parent": None,
        "max_model_len": serving.runtime.input.max_model_len,
    }


async def list_models(request: Request) -> Response:
    """Answers {object: list, data}, an entry for each name."""
    serving = serving_of(request)
    entries = [model_entry(serving, name) for name in serving.config.model_names]
    return JSONResponse({"object": "list", "data": entries})


async def retrieve_model(request: Request) -> Response:
    """Answers what is said about one name, which may have slashes."""
    serving = serving_of(request)
    return JSONResponse(model_entry(serving, require_served(serving, request.path_params["id"])))


ROUTES: list[BaseRoute] = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{id:path}", retrieve_model, methods=["GET"]),
]
