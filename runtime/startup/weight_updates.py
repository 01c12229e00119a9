"""Weights that a worker is given while it lives: tensors, a folder, or a group that a trainer sends to."""

from dataclasses import replace
from typing import Any

from ...common.errors import UnsupportedError
from ...common.progress import say_nothing
from .folder import find_folder
from .loaded import LoadedWorker
from .weight_sources import another_source


def update_weights(worker: LoadedWorker, kind: str, value: Any) -> None:
    """Replaces a worker's weights where they lie; no step may be in flight. See Runtime.update_weights.

    kind: "tensors" by name, "file" of them in safetensors, "folder" of a checkpoint, or "group", as the
    fields of a WeightGroup. UnsupportedError where it holds the part of one of several ranks.
    """
    weights, resolved = worker.runner.own_weights, worker.resolved
    if (ranks := resolved.config.tensor_parallel) > 1:
        raise UnsupportedError(f"tensor_parallel is {ranks}, and weights of several ranks are not replaced")
    match kind:
        case "folder":
            config = replace(resolved.config, model=value, revision=None, load_format="auto")
            folder = find_folder(config, resolved.store, resolved.device, say_nothing)
            weights.read_from(another_source(resolved, folder))
        case "group":
            from ..weight_group import WeightGroup  # with torch.distributed, which takes long to import

            WeightGroup(**value).receive(weights.check, weights.replace)
        case "file":
            from safetensors.torch import load_file

            weights.replace(load_file(value))
        case _:
            weights.replace(value)
