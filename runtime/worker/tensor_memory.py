"""The memory of tensors, which goes and comes while the tensors stay."""

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from ...common.pages import give_pages_back


class TensorMemory:
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
        """Give it back; what it held is lost.

        On a CPU page by page: what is freed may stay in the heap of the thread that had it allocated.
        """
        for storage, device in zip(self._storages, self._devices, strict=True):
            if device.type != "cpu" or not give_pages_back(storage.data_ptr(), storage.nbytes()):
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


def _bytes_of(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
