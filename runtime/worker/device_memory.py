"""What a worker gives back of its device while it sleeps, and takes again behind the same tensors."""

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, UntypedStorage

from ..protocol.scheduler_output import NULL_BLOCK

Place = Literal["device", "host", "nowhere"]
SLAB_BYTES = 256 << 20  # of pinned memory, a power of two: torch takes no less for what is a little smaller


class _Memory:
    """The memory of tensors, which goes and comes while the tensors stay the objects that others hold."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        own = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.nbytes}
        self._storages = [tensor.untyped_storage() for tensor in own.values()]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._devices = [tensor.device for tensor in own.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it while it is there."""
        return sum(self._sizes)

    def drop(self) -> None:
        """Give it back; what it held is lost."""
        for storage in self._storages:
            storage.resize_(0)

    def take(self) -> None:
        """Take again what is not there, with any contents."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)

    def views(self) -> list[Tensor]:
        """All of it as bytes; it must be there."""
        return [
            _bytes_of(storage, device) for storage, device in zip(self._storages, self._devices, strict=True)
        ]


class ModelWeights:
    """A model's weights, on their device unless they were moved to the host or dropped.

    On a CPU they are on the host already, and stay where they are unless they are dropped.
    """

    def __init__(self, tensors: Iterable[Tensor], read_again: Callable[[], None]) -> None:
        """read_again(): fills these tensors anew from where they came; it may raise LoadError."""
        tensors = [*tensors]
        self._memory = _Memory(tensors)
        self._is_on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        self._read_again = read_again
        self._slabs: list[Tensor] = []
        self.place: Place = "device"

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them on the device."""
        return self._memory.num_bytes

    def leave(self, level: int) -> None:
        """Level 1: to pinned host memory; level 2: nowhere, to be read again.

        RuntimeError of torch's where the host has no memory for them: then nothing has changed.
        """
        if level == 1 and self.place == "device" and not self._is_on_host:
            self._copy_to_host()
            self.place = "host"
            self._memory.drop()
        elif level == 2 and self.place != "nowhere":
            self.place = "nowhere"
            self._memory.drop()
            self._slabs.clear()

    def come(self) -> None:
        """Have them on the device again; whatever interrupts it, it can be called again."""
        if self.place == "device":
            return
        self._memory.take()
        if self.place == "host":
            for view, (slab, start, size) in self._moves():
                view.copy_(slab[start : start + size], non_blocking=True)
            torch.cuda.synchronize()
        else:
            self._read_again()
        self.place = "device"

    def _copy_to_host(self) -> None:
        wanted = -(-self.num_bytes // SLAB_BYTES)
        while len(self._slabs) < wanted:  # kept from sleep to sleep: to pin memory takes long
            self._slabs.append(torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=True))
        for view, (slab, start, size) in self._moves():
            slab[start : start + size].copy_(view, non_blocking=True)
        torch.cuda.synchronize()

    def _moves(self) -> list[tuple[Tensor, tuple[Tensor, int, int]]]:
        """Pieces of the weights as bytes, and where each lies in the slabs: slab, first byte, number."""
        moves, place = [], 0
        for view in self._memory.views():
            done = 0
            while done < view.nbytes:
                slab, start = divmod(place, SLAB_BYTES)
                size = min(view.nbytes - done, SLAB_BYTES - start)
                moves.append((view[done : done + size], (self._slabs[slab], start, size)))
                done, place = done + size, place + size
        return moves


class DeviceMemory:
    """The weights and the KV cache of a worker: all that is large of what it holds on its device."""

    def __init__(self, weights: ModelWeights, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """caches: keys and values of each layer, and of those of a drafter."""
        self.weights = weights
        self._caches = caches
        self._cache = _Memory(tensor for pair in caches for tensor in pair)

    @property
    def num_bytes(self) -> int:
        """Bytes of both while they are there."""
        return self.weights.num_bytes + self._cache.num_bytes

    def give_back(self, level: int) -> None:
        """Give the KV cache back, and the weights as the level says; no step may be in flight."""
        self.weights.leave(level)  # first: where the host has no room for them nothing has changed
        self._cache.drop()
        _return_to_system()

    def take(self) -> None:
        """Take all of it again, blocks of the cache with any contents but the null block, which is zeros."""
        self.weights.come()
        self._cache.take()
        for keys, values in self._caches:
            keys[NULL_BLOCK].zero_()
            values[NULL_BLOCK].zero_()


def _bytes_of(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _return_to_system() -> None:
    """What is free is kept by torch's allocator of a GPU, and by the C library on the host."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)
