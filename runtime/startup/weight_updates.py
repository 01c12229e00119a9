"""Weights that a worker is given while it lives: tensors, a folder, or a group that a trainer sends to."""

from dataclasses import replace
from typing import Any

from ...common.errors import ConfigError
from ...common.progress import say_nothing
from ...custom_ops.all_reduce.group import current_world
from .folder import find_folder
from .loaded import LoadedWorker
from .weight_sources import another_source


def update_weights(worker: LoadedWorker, kind: str, value: Any) -> None:
    """Replaces a worker's weights where they lie; no step may be in flight. See Runtime.update_weights.

    kind: "tensors" by name, "file" of them in safetensors, "folder" of a checkpoint, or "group", as the
    fields of a WeightGroup. Of several ranks each takes its part.
    """
    weights, resolved = worker.runner.own_weights, worker.resolved
    match kind:
        case "folder":
            config = replace(resolved.config, model=value, revision=None, load_format="auto")
            folder = find_folder(config, resolved.store, resolved.device, say_nothing)
            weights.read_from(another_source(resolved, folder))
        case "group":
            from ..weight_group import WeightGroup  # with torch.distributed, which takes long to import

            own = _of_rank(value, current_world().rank, resolved.world_size)
            WeightGroup(**own).receive(weights.check, weights.replace)
        case "file":
            from safetensors.torch import load_file

            weights.replace(load_file(value))
        case _:
            weights.replace(value)


def _of_rank(group: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """The fields of a WeightGroup for one of several ranks, which have as many ranks of it from `rank` on.

    ConfigError where it has not so many.
    """
    first, size = group["rank"], group["world_size"]
    if first < size < first + ranks:  # a first one that there is not is refused by the group itself
        raise ConfigError(
            f"world_size is {size}; wanted at least {first + ranks}, since each of {ranks} ranks receives, "
            f"from rank {first} on"
        )
    return group if first == 0 else {**group, "rank": first + rank}
