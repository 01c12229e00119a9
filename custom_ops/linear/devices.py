"""What measurements know a device by, and how many processors it has."""

import functools
import platform
from pathlib import Path

import torch


@functools.cache
def processors_of(device: torch.device) -> int:
    """How many multiprocessors a GPU has, or the part of one that this process was given."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def device_name_of(device: torch.device, dtype: torch.dtype) -> str:
    """The name by which measurements know a device; of a CPU with the dtype.

    Not with the number of threads, so that another number gives the same tokens.
    """
    if device.type == "cuda":
        return _gpu_name(device)
    return f"{_name_of_cpu()} in {dtype}"


@functools.cache
def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@functools.cache
def _name_of_cpu() -> str:
    """The model name in /proc/cpuinfo, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
