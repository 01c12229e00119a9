"""`lamina serve`: a model over HTTP, as clients of OpenAI ask for it."""

import asyncio
from enum import Enum
from importlib import import_module
from typing import Annotated, Any

import typer

from ..common.extras import require
from . import options

NEEDED = ("httptools", "msgspec", "prometheus_client", "starlette", "uvicorn", "zmq")


class EngineKind(Enum):
    """Where the engine runs."""

    process = "process"
    thread = "thread"


Engine = Annotated[EngineKind, typer.Option(help="Run the engine in a process or in a thread of its own.")]


@options.spread
def serve(
    serving: options.Serving,
    settings: options.Settings,
    model: options.Model = None,
    engine: Engine = EngineKind.process,
) -> None:
    """Serve a model over HTTP, as clients of OpenAI and Anthropic ask for it.

    Listens at once and answers 503 while the model loads. SIGTERM or Ctrl-C lets running requests finish, a
    second one ends at once. Exits with 0 after that, 1 once the engine is lost, 2 where it cannot start.
    """
    for module in NEEDED:
        require(module, extra="serve")
    chosen = settings.model(model)
    given = settings.given()
    config = serving.config(chosen)

    async def open_runtime() -> Any:
        module = await asyncio.to_thread(import_module, "lamina.runtime.async_runtime")
        from .progress import loading_progress

        with loading_progress() as progress:
            return await module.AsyncRuntime.from_pretrained(
                chosen, engine=engine.value, progress=progress, **given
            )

    from ..serving.server import serve as run

    raise typer.Exit(run(config, open_runtime))
