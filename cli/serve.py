"""`lamina serve`: a model or several over HTTP, as clients of OpenAI ask for them."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from importlib import import_module
from typing import Annotated, Any

import typer

from ..common.extras import require
from . import options
from .served_models import configs, named_models, own_settings

NEEDED = ("httptools", "msgspec", "prometheus_client", "starlette", "uvicorn")


class EngineKind(Enum):
    """Where the engine runs."""

    process = "process"
    thread = "thread"


Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL...",
        help="A model folder, a .gguf file or a hub id, or NAME=MODEL; several take turns on the device.",
        show_default=False,
    ),
]
Engine = Annotated[EngineKind, typer.Option(help="Run the engine in a process or in a thread of its own.")]
OwnSettings = Annotated[
    list[str] | None,
    typer.Option(
        help="A setting of one of several models alone, as MODEL.max_model_len=4096. May be repeated.",
        show_default=False,
    ),
]


OnRay = Annotated[
    bool, typer.Option("--ray", help="Serve replicas behind Ray Serve, on the cluster of RAY_ADDRESS.")
]


@options.spread
def serve(
    serving: options.Serving,
    settings: options.Settings,
    replicas: options.RayReplicas,
    models: Models = None,
    engine: Engine = EngineKind.process,
    model_setting: OwnSettings = None,
    ray: OnRay = False,
) -> None:
    """Serve a model over HTTP, as clients of OpenAI and Anthropic ask for it.

    Of several models one is awake (--max-resident), and the others take turns with it. An option is for all
    of them, but for --model-names MODEL=NAME, --lora-modules MODEL=NAME=FOLDER and --model-setting.

    Listens at once and answers 503 while the model loads. SIGTERM or Ctrl-C lets running requests finish, a
    second one ends at once. Exits with 0 after that, 1 once the engine is lost, 2 where it cannot start.
    """
    for module in NEEDED:
        require(module, extra="serve")
    first, more = (models[0], models[1:]) if models else (None, [])
    chosen = named_models([settings.model(first), *more])
    given, own = settings.given(), own_settings(model_setting or (), chosen, options.OF_MODELS)
    opened = [_opening(model.path, engine, given | own[model.name]) for model in chosen]
    config, *others = configs(serving.given(), chosen)

    if ray or replicas.given():
        if others or not ray:
            message = "wanted --ray with them" if not ray else "Ray Serve has replicas of one model"
            raise typer.BadParameter(message, param_hint="--ray" if ray else "--ray-…")
        from ..serving.ray_config import RayServeConfig
        from ..serving.ray_serve import serve_on_ray

        scale = RayServeConfig(**replicas.given())
        opening = {"engine": engine.value, "settings": given}
        raise typer.Exit(serve_on_ray(config, scale, chosen[0].path, **opening))
    from ..serving.server import serve as run

    raise typer.Exit(run(config, opened[0], list(zip(others, opened[1:], strict=True))))


def _opening(model: str, engine: EngineKind, settings: dict[str, Any]) -> Callable[[], Awaitable[Any]]:
    async def open_runtime() -> Any:
        module = await asyncio.to_thread(import_module, "lamina.runtime.async_runtime")
        from .progress import loading_progress

        with loading_progress() as progress:
            return await module.AsyncRuntime.from_pretrained(
                model, engine=engine.value, progress=progress, **settings
            )

    return open_runtime
