"""LoRA adapters that come and go: POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from ...common.errors import ConfigError, LoadError, shown
from ..context import Serving, serving_of
from ..errors import ApiError
from ..middleware.body import read_body
from ..protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from ..protocol.decoding import wrong
from ..served_models import models_of
from ..streaming.handlers import receive


async def load_lora_adapter(request: Request) -> Response:
    """Loads an adapter from a folder of the server's machine, for requests to ask for as their model."""
    _require_allowed(request)
    asked = (await receive(request, LoadAdapterRequest, await read_body(request))).given
    serving = serving_of(request)
    _check_name(request, serving, asked.lora_name)
    try:
        await serving.runtime.load_adapter(asked.lora_name, asked.lora_path)
    except (ConfigError, LoadError) as error:
        raise wrong("lora_path", str(error)) from error
    return PlainTextResponse(f"Success: LoRA adapter {asked.lora_name!r} added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Forgets an adapter: requests that have it go on to their end, later ones are answered 404."""
    _require_allowed(request)
    asked = (await receive(request, UnloadAdapterRequest, await read_body(request))).given
    serving = serving_of(request) if asked.model is not None else models_of(request).holding(asked.lora_name)
    await serving.runtime.unload_adapter(asked.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter {asked.lora_name!r} removed successfully.")


def _require_allowed(request: Request) -> None:
    """Raises ApiError 403 where clients may not change what is served."""
    if not serving_of(request).config.lora_updates:
        message = "clients may not load adapters here; start the server with --lora-updates"
        raise ApiError(status=403, message=message, code="lora_updates_off")


def _check_name(request: Request, serving: Serving, name: str) -> None:
    """Raises ApiError 400 for a name of a model, or of an adapter of another model."""
    models = models_of(request)
    if name in models.names:
        owner = "the model's own" if len(models) == 1 else "a model's own"
        raise wrong("lora_name", f"lora_name is {shown(name)}, {owner}; wanted another")
    if models.holding(name) is not serving and name in models.holding(name).adapter_names:
        raise wrong("lora_name", f"lora_name is {shown(name)}, an adapter of another model; wanted another")


ROUTES: list[BaseRoute] = [
    Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
]
