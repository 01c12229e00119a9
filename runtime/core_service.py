"""A model loaded to be served from elsewhere: its core, and what may be asked of it beside requests."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..common.errors import KernelLaunchError
from ..common.progress import Progress
from .config import RuntimeConfig
from .engine.core_handle import OpenedCore
from .engine.core_loop import CoreService
from .executor.executor import Executor
from .protocol.engine_output import Timeline
from .startup.captures import is_lazy
from .startup.description import describe
from .startup.identity import system_fingerprint
from .startup.loaded import LoadedRuntime
from .startup.loader import OnFolder, load
from .stats import collect_stats, explanation_of, page_of
from .weight_messages import hand_over_plain


def open_core(
    model: str | Path, settings: Mapping[str, Any], progress: Progress, on_folder: OnFolder | None = None
) -> tuple[CoreService, OpenedCore]:
    """Returns a model ready to be stepped by the thread that calls, and what others know of it.

    settings: the fields of RuntimeConfig. on_folder and errors: those of load().
    """
    loaded = load(RuntimeConfig(model=model, **settings), progress, on_folder)
    held = [loaded]  # let go of by give_back alone
    opened = OpenedCore(description=describe(loaded), tokenizer=loaded.tokenizer, grammars=loaded.grammars)
    return (
        CoreService(
            core=loaded.core,
            description=opened.description,
            methods={
                "stats": lambda: collect_stats(held[0]),
                "fingerprint": lambda: system_fingerprint(held[0]),
                "update_weights": partial(
                    hand_over_plain, loaded.core.update_weights, loaded.resolved.config.parallel
                ),
                "explain": lambda: explanation_of(held[0]),
                "load_adapter": lambda path: held[0].core.load_adapter(path),
                "unload_adapter": lambda digest: held[0].core.unload_adapter(digest),
                "explain_html": lambda: page_of(held[0]),
                "count_whole": lambda times, count: held[0].core.count_whole(Timeline(*times), count),
            },
            is_lazy=is_lazy(loaded.resolved.config),
            on_build=loaded.late_builds,
            check_device=partial(_check, loaded.executor, loaded.resolved.device),
            give_back=partial(_give_back, held),
        ),
        opened,
    )


def _check(executor: Executor, device: torch.device) -> None:
    executor.check()
    check_device(device)


def check_device(device: torch.device) -> None:
    """Raises KernelLaunchError for a GPU that computes nothing any more: after some faults none does."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise KernelLaunchError(f"{device} has failed, and serves this process no more: {error}") from error


def _give_back(held: list[LoadedRuntime]) -> None:
    loaded = held.pop()
    if loaded.decision_log is not None:
        loaded.decision_log.close()
    if loaded.resolved.device.type == "cuda":
        del loaded
        torch.cuda.empty_cache()  # torch would keep it, and who loads next would find the GPU full
