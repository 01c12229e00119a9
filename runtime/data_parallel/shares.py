"""What each of several engines is given: its settings, and its part of the machine's GPUs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common import env
from ...common.errors import ConfigError, shown
from ..parallel import ParallelConfig

PARALLEL = ("data_parallel", "tensor_parallel", "pipeline_parallel")
DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU that the driver lets this system see


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one engine is made with."""

    number: int  # of the engine, from 0
    settings: Mapping[str, Any]  # the fields of RuntimeConfig
    environment: Mapping[str, str] | None  # of its process; None: that of this one
    gpus: tuple[str, ...]  # that it alone uses


def shares(settings: Mapping[str, Any]) -> list[Share]:
    """Returns what each engine of `settings["data_parallel"]` is made with.

    On GPUs each has as many as it has ranks, those after the engine's before, but on a Ray cluster, which
    gives out its own. ConfigError where there are too few, one device is named, or no such cluster.
    """
    given = {name: settings[name] for name in PARALLEL if name in settings}
    parallel = ParallelConfig(**given)
    on_ray = settings.get("executor") == "ray"
    if on_ray and env.ray_address() is None:
        got = f"executor is 'ray', data_parallel {parallel.data_parallel} and RAY_ADDRESS is not set"
        raise ConfigError(f"{got}; wanted the address of a cluster, which engines share")
    gpus = [] if on_ray else _gpus(settings.get("device", "auto"), parallel)
    return [_share(settings, number, gpus, parallel.world_size) for number in range(parallel.data_parallel)]


def _share(settings: Mapping[str, Any], number: int, gpus: list[str], each: int) -> Share:
    own = dict(settings)
    if (record := own.get("record")) is not None:
        path = Path(record)
        own["record"] = os.fspath(path.with_name(f"{path.stem}.{number}{path.suffix}"))
    if not gpus:
        return Share(number=number, settings=own, environment=None, gpus=())
    mine = tuple(gpus[number * each : (number + 1) * each])
    return Share(number=number, settings=own, environment=env.with_gpus(mine), gpus=mine)


def _gpus(device: object, parallel: ParallelConfig) -> list[str]:
    """The GPUs to share out; none where engines are to run on the CPU."""
    name = str(device)
    if name == "cpu":
        return []
    if name not in ("auto", "cuda"):
        got = f"device is {shown(name)} and data_parallel {parallel.data_parallel}"
        raise ConfigError(f"{got}; wanted auto, cpu or cuda: CUDA_VISIBLE_DEVICES says which GPUs")
    found = env.visible_gpus()
    if found is None:
        found = [str(number) for number in range(num_gpus())]
    wanted = parallel.data_parallel * parallel.world_size
    if len(found) < wanted and (found or name == "cuda"):
        got = f"data_parallel is {parallel.data_parallel} and tensor_parallel {parallel.tensor_parallel}"
        if parallel.pipeline_parallel > 1:
            got += f" and pipeline_parallel {parallel.pipeline_parallel}"
        raise ConfigError(f"{got}, which takes {wanted} GPUs; {len(found)} are visible")
    return found[:wanted]


def num_gpus(driver: Path = DRIVER) -> int:
    """Returns how many GPUs NVIDIA's driver names, without any library of its."""
    return len([*driver.iterdir()]) if driver.is_dir() else 0
