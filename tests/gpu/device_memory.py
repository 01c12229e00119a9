"""How much of a GPU's memory this process has, whatever others do beside it."""

import os

import pynvml
import torch


def bytes_of_this_process() -> int:
    """What the driver counts for this process on the current GPU; what torch holds where it does not say."""
    torch.cuda.synchronize()
    pynvml.nvmlInit()
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    finally:
        pynvml.nvmlShutdown()
    return own[0] if own and own[0] is not None else torch.cuda.memory_reserved()
