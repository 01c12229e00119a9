"""Memory bandwidth, the ceiling of decoding, measured beside the figures that it explains."""

import time
from collections.abc import Callable

import torch

BYTES = 1 << 29  # well above what is each core's own cache


def measure(repeats: int = 5) -> dict[str, float]:
    """GB/s of reading one large buffer, and of reading one and writing another."""
    source = torch.ones(BYTES // 4)
    target = torch.empty_like(source)
    return {
        "read": _best(source.sum, BYTES, repeats),
        "copy": _best(lambda: target.copy_(source), 2 * BYTES, repeats),
    }


def measure_read(num_bytes: int, repeats: int = 5) -> float:
    """GB/s of reading a buffer of so many bytes."""
    return _best(torch.ones(num_bytes // 4).sum, num_bytes, repeats)


def _best(action: Callable[[], object], num_bytes: int, repeats: int) -> float:
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return num_bytes / min(times) / 1e9
