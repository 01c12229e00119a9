"""Where the core of an AsyncRuntime runs: in a thread, in a process, or in several."""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..common.errors import ConfigError, shown
from ..common.progress import Progress, say_nothing
from .engine.core_handle import CoreHandle, OpenedCore
from .parallel import ParallelConfig

if TYPE_CHECKING:
    from .engine.core_loop import CoreService

EngineKind = Literal["thread", "process"]


def core_handle(
    engine: EngineKind, model: str | Path, settings: Mapping[str, Any], progress: Progress
) -> CoreHandle:
    """Returns the handle of a core that begins to load; ConfigError for an engine that there is not."""
    num_engines = ParallelConfig(data_parallel=settings.get("data_parallel", 1)).data_parallel
    if engine == "thread":
        if num_engines > 1:
            got = f"engine is 'thread' and data_parallel {num_engines}"
            raise ConfigError(f"{got}; wanted engine='process', as each replica has a process of its own")
        from .engine.core_thread import ThreadCore  # with torch, which a client of a process does without

        return ThreadCore(partial(_open_core, model, settings), progress)
    if engine != "process":
        raise ConfigError(f"engine is {shown(engine)}; wanted 'thread' or 'process'")
    if num_engines > 1:
        return _several(model, settings, progress)
    from .engine.core_process import ProcessCore

    return ProcessCore(model, settings, progress)


def _several(model: str | Path, settings: Mapping[str, Any], progress: Progress) -> CoreHandle:
    """One handle of several processes; the first one's progress is that of all, as they load alike."""
    from .data_parallel.replicated_core import ReplicatedCore
    from .data_parallel.shares import Share, shares
    from .engine.core_process import ProcessCore

    def open_engine(share: Share) -> ProcessCore:
        is_first = share.number == 0
        return ProcessCore(
            model,
            share.settings,
            progress if is_first else say_nothing,
            environment=share.environment,
            has_tokenizer=is_first,
        )

    return ReplicatedCore(shares(settings), open_engine)


def reported_in(loop: asyncio.AbstractEventLoop, progress: Progress | None) -> Progress:
    """Returns a progress that any thread may call, and that is called in the loop's."""
    if progress is None:
        return say_nothing

    def report(stage: str, fraction: float, detail: str) -> None:
        loop.call_soon_threadsafe(progress, stage, fraction, detail)

    return report


def _open_core(
    model: str | Path, settings: Mapping[str, Any], progress: Progress
) -> "tuple[CoreService, OpenedCore]":
    from .core_service import open_core  # in the core's thread, as this imports torch for seconds

    return open_core(model, settings, progress)
