"""Parts of a file's tensors on a device, read by a few threads into buffers while others are copied from."""

import os
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .safetensors_header import num_bytes
from .shards import opened

NUM_THREADS, NUM_BUFFERS = 4, 8
BUFFER_BYTES = 1 << 24  # a power of two: torch pins no less for what is a little smaller


class Extent(NamedTuple):
    """Where numbers lie in a file, one behind the other, and the tensor that they make."""

    offset: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class ReadAhead:
    """Reads files by threads into pinned buffers of a fixed size, and copies to a device from there.

    Of a device that is no GPU the buffers are plain memory. torch keeps what it has pinned for the next time.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        num_threads: int = NUM_THREADS,
        num_buffers: int = NUM_BUFFERS,
        buffer_bytes: int = BUFFER_BYTES,  # the most that an extent may have
    ) -> None:
        self.device, self.buffer_bytes = device, buffer_bytes
        self._num_threads = num_threads
        self._buffers = [_Buffer(buffer_bytes, device) for _ in range(num_buffers)]

    def tensors(self, path: Path, extents: Iterable[Extent]) -> Generator[Tensor]:
        """New tensors on the device, in the order of the extents.

        Whatever ends or closes it, no thread is left, and the stream has done what it was given. Raises
        LoadError for a file that is damaged, or ends before an extent does.
        """
        waiting: deque[tuple[_Buffer, Extent, Future[None]]] = deque()
        with opened(path), path.open("rb", buffering=0) as file:
            pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="lamina-read-ahead")
            try:
                for buffer, extent in zip(cycle(self._buffers), extents, strict=False):
                    if len(waiting) == len(self._buffers):  # this buffer is that of the first
                        yield _once_filled(*waiting.popleft())
                    waiting.append((buffer, extent, pool.submit(buffer.fill, file.fileno(), extent)))
                while waiting:
                    yield _once_filled(*waiting.popleft())
            finally:
                pool.shutdown(cancel_futures=True)
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()


class _Buffer:
    """Memory of the host that is filled again once a device has copied what it held."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._device = device
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda)
        self._bytes = self._memory.numpy().data
        self._is_copied: Any = torch.cuda.Event(blocking=True) if is_cuda else None  # type: ignore[no-untyped-call]

    def fill(self, file: int, extent: Extent) -> None:
        """Read an extent of an open file; OSError where it has no such bytes."""
        if self._is_copied is not None:
            self._is_copied.synchronize()
        done, wanted = 0, num_bytes(extent.dtype, extent.shape)
        while done < wanted:
            count = os.preadv(file, [self._bytes[done:wanted]], extent.offset + done)
            if count == 0:
                raise OSError(f"it ends {wanted - done} bytes before a tensor does")
            done += count

    def copy(self, extent: Extent) -> Tensor:
        """What it was filled with, as a tensor of the device, which may not have copied it yet."""
        held = self._memory[: num_bytes(extent.dtype, extent.shape)].view(extent.dtype).view(extent.shape)
        copied = held.to(self._device, non_blocking=True, copy=True)
        if self._is_copied is not None:
            self._is_copied.record(torch.cuda.current_stream(self._device))
        return copied


def _once_filled(buffer: _Buffer, extent: Extent, filled: Future[None]) -> Tensor:
    filled.result()
    return buffer.copy(extent)
