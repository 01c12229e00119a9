"""How much of a GPU's memory this process has."""

import os

import pynvml
import torch


def bytes_of_this_process() -> int:
    """What the driver counts for this process on the current GPU; where it does not say, what all have."""
    torch.cuda.synchronize()
    own = _own_bytes()
    if own is not None:
        return own
    free, total = torch.cuda.mem_get_info()
    return total - free


def _own_bytes() -> int | None:
    pynvml.nvmlInit()
    try:
        uuid = str(torch.cuda.get_device_properties().uuid).removeprefix("GPU-")
        device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        return next((each.usedGpuMemory for each in processes if each.pid == os.getpid()), None)
    finally:
        pynvml.nvmlShutdown()
