"""What a worker gives back of its device while it sleeps, and takes again."""

import ctypes
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..protocol.scheduler_output import NULL_BLOCK
from .model_weights import ModelWeights
from .tensor_memory import TensorMemory


class DeviceMemory:
    """The weights and the KV cache of a worker: all that is large of what it holds on its device."""

    def __init__(self, weights: Sequence[ModelWeights], caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """weights: of the model, and of what drafts for it; caches: keys and values of each layer."""
        self.weights = weights
        self._caches = caches
        self._cache = TensorMemory(tensor for pair in caches for tensor in pair)

    @property
    def num_bytes(self) -> int:
        """Bytes of both while they are there."""
        return sum(one.num_bytes for one in self.weights) + self._cache.num_bytes

    def give_back(self, level: int) -> None:
        """Give the KV cache back, and the weights as the level says; no step may be in flight."""
        for one in self.weights:
            one.leave(level)  # first: where the host has no room for them nothing was dropped
        self._cache.drop()
        _return_to_system()

    def take(self) -> None:
        """Take all of it again, blocks of the cache with any contents but the null block, which is zeros."""
        for one in self.weights:
            one.come()
        self._cache.take()
        for keys, values in self._caches:
            keys[NULL_BLOCK].zero_()
            values[NULL_BLOCK].zero_()


def _return_to_system() -> None:
    """What is free is kept by torch's allocator of a GPU, and by the C library on the host."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)
