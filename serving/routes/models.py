"""Which names the model answers to: GET /v1/models and /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..auth.key import key_of
from ..context import Serving
from ..served_models import models_of


def model_entry(serving: Serving, name: str) -> dict[str, Any]:
    """Returns what is said about one name: the model's, whose root is the first of them, or an adapter's.

    Length and tasks are not known before a model is loaded.
    """
    first, is_adapter = serving.config.model_names[0], name in serving.adapter_names
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "lamina",
        "root": first,
        "parent": first if is_adapter else None,
    }
    if serving.loaded is None:
        return entry | ({"root": dict(serving.config.adapters)[name]} if is_adapter else {})
    known = serving.runtime.input
    root = known.adapters[name].path if is_adapter else first
    return entry | {"root": root, "max_model_len": known.max_model_len, "tasks": known.tasks}


async def list_models(request: Request) -> Response:
    """Answers {object: list, data}, an entry for each name that the key may ask by."""
    key = key_of(request)
    names = [
        (serving, name)
        for serving in models_of(request)
        for name in (*serving.config.model_names, *serving.adapter_names)
    ]
    entries = [model_entry(serving, name) for serving, name in names if key.allows_model(name)]
    return JSONResponse({"object": "list", "data": entries})


async def retrieve_model(request: Request) -> Response:
    """Answers what is said about one name, which may have slashes."""
    name = request.path_params["id"]
    serving = models_of(request).find(name)
    key_of(request).require_model(name)
    return JSONResponse(model_entry(serving, name))


ROUTES: list[BaseRoute] = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{id:path}", retrieve_model, methods=["GET"]),
]
