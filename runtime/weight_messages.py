"""Weights for an engine that runs elsewhere, as what can be sent to it."""

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..common.errors import RequestError, UnsupportedError, shown
from .parallel import ParallelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from .weight_group import WeightGroup

Weights: TypeAlias = "Mapping[str, Tensor] | str | Path | WeightGroup"
IN_MEMORY = "/dev/shm"
FILE = "weights.safetensors"


def plain_of(weights: "Weights") -> tuple[str, Any]:
    """What workers take of these: a kind, and its value. RequestError for anything else."""
    if isinstance(weights, (str, Path)):
        return "folder", os.fspath(weights)
    if isinstance(weights, Mapping):
        return "tensors", weights
    group = sys.modules.get(f"{__package__}.weight_group")  # whoever made one has imported it, and torch
    if group is not None and isinstance(weights, group.WeightGroup):
        return "group", dataclasses.asdict(weights)
    raise RequestError(f"weights are {shown(weights)}; wanted tensors by name, a folder, or a WeightGroup")


def hand_over(update: Callable[[str, Any], None], weights: "Weights", parallel: ParallelConfig) -> None:
    """Give an engine of this process weights. RequestError as of plain_of()."""
    hand_over_plain(update, parallel, *plain_of(weights))


def hand_over_plain(
    update: Callable[[str, Any], None], parallel: ParallelConfig, kind: str, value: Any
) -> None:
    """Give it what plain_of() has made of some; tensors for workers in other processes travel by a file.

    UnsupportedError for tensors where workers may be on other machines.
    """
    if kind == "tensors" and parallel.executor == "ray":
        raise UnsupportedError(
            "weights are tensors and executor is 'ray', whose workers may be on other machines; wanted a "
            "folder that all of them have, or a WeightGroup"
        )
    if kind == "tensors" and parallel.has_processes:
        with written(value) as folder:
            update("file", os.path.join(folder, FILE))
    else:
        update(kind, value)


def written(tensors: "Mapping[str, Tensor]") -> "tempfile.TemporaryDirectory[str]":
    """A folder of this user alone with these in FILE; whoever enters it leaves nothing behind."""
    from safetensors.torch import save_file

    from ..models.checkpoints.weight_update import headers_of

    headers_of(tensors)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    has_room = os.path.isdir(IN_MEMORY) and shutil.disk_usage(IN_MEMORY).free > 2 * num_bytes
    folder = tempfile.TemporaryDirectory(prefix="lamina-", dir=IN_MEMORY if has_room else None)
    try:
        own = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        save_file(own, os.path.join(folder.name, FILE))
    except BaseException:
        folder.cleanup()
        raise
    return folder
