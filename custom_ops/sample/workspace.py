"""Device memory that the kernels of lamina::sample write between their launches."""

import functools

import torch
from torch import Tensor

from ...common.errors import UnsupportedError


def workspace(device: torch.device, size: int) -> Tensor:
    """At least so many float32 numbers, at the same address every time; each call overwrites them."""
    return _allocate(device, 1 << max(size - 1, 1).bit_length())


# Never freed, since captured graphs hold the addresses; shared by all calls, which one stream must order.
@functools.cache
def _allocate(device: torch.device, size: int) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("sample has no workspace of this size yet; run once before the capture")
    return torch.empty(size, dtype=torch.float32, device=device)
