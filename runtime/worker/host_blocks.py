"""Host memory for blocks of the KV cache that make room for others, and the copies there and back."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...custom_ops._shared.fp8 import as_bytes
from ..protocol.scheduler_output import Copies
from .slabs import slots_of_slab, taken_bytes
from .staging import send

STAGED_BYTES = 32 << 20  # on the device, of blocks that are copied together


class HostBlocks:
    """Slots that hold a block of every layer each, keys and values; pinned memory for a GPU.

    Layers may have blocks of different sizes, all of one dtype.

    Copies are launched on the current stream, so that they run in the order of the steps that they belong to;
    the host itself never reads or writes a slot. A copy gathers the blocks of all layers on the device first:
    a slot lies in one piece, so that one transfer takes it.
    """

    def __init__(self, caches: Sequence[tuple[Tensor, Tensor]], num_slots: int) -> None:
        # [num_blocks, numbers of a block]
        self._caches = [as_bytes(cache).flatten(1) for pair in caches for cache in pair]
        first = self._caches[0]
        self._device, self._dtype = first.device, first.dtype
        self._widths = [cache.shape[1] for cache in self._caches]
        self._shape = (sum(self._widths),)  # of a slot
        self.slot_bytes = sum(cache[0].nbytes for cache in self._caches)
        self._num_slots, self._is_pinned = num_slots, self._device.type == "cuda"
        self._slots_per_slab = slots_of_slab(self.slot_bytes, is_pinned=self._is_pinned)
        self._slabs: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Host memory taken so far."""
        return sum(taken_bytes(slab.nbytes, is_pinned=self._is_pinned) for slab in self._slabs.values())

    def clear(self) -> None:
        """Give back the memory of every slot; what they held is lost."""
        self._slabs.clear()

    def copy(self, copies: Copies) -> None:
        """Launch the copies that a step begins with: all that leave, and then all that come.

        Returns at once; MemoryError or torch's own error where the host has no memory for a slot.
        """
        most = max(1, STAGED_BYTES // self.slot_bytes)
        for start in range(0, len(copies.swap_out), most):
            self._swap_out(copies.swap_out[start : start + most])
        for start in range(0, len(copies.swap_in), most):
            self._swap_in(copies.swap_in[start : start + most])

    def _swap_out(self, moves: Sequence[tuple[int, int]]) -> None:
        blocks = self._send([block for block, _ in moves])
        staged = torch.cat([cache.index_select(0, blocks) for cache in self._caches], dim=1)
        for (_, slot), block in zip(moves, staged, strict=True):
            self._slot(slot).copy_(block, non_blocking=True)

    def _swap_in(self, moves: Sequence[tuple[int, int]]) -> None:
        staged = torch.empty((len(moves), *self._shape), dtype=self._dtype, device=self._device)
        for (slot, _), block in zip(moves, staged, strict=True):
            block.copy_(self._slot(slot), non_blocking=True)
        blocks = self._send([block for _, block in moves])
        for cache, filled in zip(self._caches, torch.split(staged, self._widths, dim=1), strict=True):
            cache.index_copy_(0, blocks, filled)

    def _slot(self, number: int) -> Tensor:
        """A slot's memory, taken now if nobody has used any near it."""
        slab, index = divmod(number, self._slots_per_slab)
        if slab not in self._slabs:
            count = min(self._slots_per_slab, self._num_slots - slab * self._slots_per_slab)
            self._slabs[slab] = torch.empty(
                (count, *self._shape), dtype=self._dtype, pin_memory=self._is_pinned
            )
        return self._slabs[slab][index]

    def _send(self, block_ids: Sequence[int]) -> Tensor:
        return send(np.array(block_ids, np.int64), self._device)
