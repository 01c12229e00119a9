"""Memory on the host from which steps are sent to a device without waiting for it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def fill(array: NDArray[Any], field: slice, values: NDArray[Any], *, padding: int) -> None:
    """Values at the beginning of a field, padding in the rest of it."""
    end = field.start + len(values)
    array[field.start : end] = values
    array[end : field.stop] = padding


def send(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device."""
    return staged(values, device).to(device, non_blocking=True)


def staged(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the host, to be sent to a device without waiting for it; on the CPU it is there already."""
    memory = staging(values.size, device, torch.from_numpy(values[:0]).dtype).view(values.shape)
    memory.numpy()[...] = values
    return memory


def send_to(memory: Tensor, values: NDArray[np.int32]) -> None:
    """Write values at the beginning of memory on a device, which is in use until then."""
    memory[: len(values)].copy_(staged(values, memory.device), non_blocking=True)


def staging(size: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Memory to send from: torch gives pinned memory out again only when the copies from it are done."""
    if device.type != "cuda":
        return torch.empty(size, dtype=dtype)
    return torch.empty(size, dtype=dtype, pin_memory=True)
