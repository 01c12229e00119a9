"""Loading a server's models: one after another, each put to sleep where the next needs its memory."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from .admission.admission import Admission
from .context import Loaded, Serving
from .served_models import ServedModels

if TYPE_CHECKING:
    from ..runtime.async_runtime import AsyncRuntime

OpenRuntime = Callable[[], Awaitable["AsyncRuntime"]]


async def load_models(models: ServedModels, open_runtimes: Sequence[OpenRuntime]) -> None:
    """Loads every model, the first one last, so that it is awake with those after it that may be, too.

    With lazy_loading those alone that are awake at first. open_runtimes: of the models, in their order.
    Raises what loading one of them raises, with none loaded.
    """
    config, servings = models.first.config, list(models)
    try:
        num_loaded = min(config.max_resident, len(servings)) if config.lazy_loading else len(servings)
        for number in reversed(range(num_loaded)):
            runtime = await load_model(servings[number], open_runtimes[number])
            if number >= config.max_resident:
                await runtime.sleep(config.swap_level)
    except BaseException:
        await close_models(models)
        raise


async def close_models(models: ServedModels) -> None:
    """Closes every runtime that there is."""
    for serving in models:
        if serving.loaded is not None:
            await serving.loaded.runtime.close()


async def load_model(serving: Serving, open_runtime: OpenRuntime) -> "AsyncRuntime":
    """Has a runtime compute what it is asked for first, and the model served by it; returns it."""
    runtime = await open_runtime()
    try:
        await runtime.warm_up()
        for name, folder in serving.config.adapters:
            await runtime.load_adapter(name, folder)
        fingerprint = await runtime.call("fingerprint")
    except BaseException:
        await runtime.close()
        raise
    admission = Admission(serving.config, serving.lifecycle, serving.keys, runtime)
    for listener in (serving.metrics, admission):
        runtime.listen(listener)
    serving.loaded = Loaded(runtime=runtime, admission=admission, fingerprint=fingerprint)
    return runtime
