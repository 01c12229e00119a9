"""A model's weights: moved off its device, dropped, read again and replaced, behind the same tensors."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ...common.errors import LoadError, shown
from ...custom_ops.all_reduce.group import current_world, said_by_all
from ...models.checkpoints.loaded_weights import LoadedWeights
from ...models.checkpoints.weight_update import Header, check_update, check_values, headers_of, write
from ...models.checkpoints.weights import Slot
from .tensor_memory import TensorMemory

Place = Literal["device", "host", "nowhere"]
NUM_SAMPLES = 1024  # numbers of a tensor that its digest is made of
SLAB_BYTES = 256 << 20  # of pinned memory, a power of two: torch takes no less for what is a little smaller


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """Where a model's weights come from."""

    read: Callable[[LoadedWeights], None] | None  # fills them anew; None: they are nowhere else
    folder: Path | None = None  # of a checkpoint
    digest: str | None = None  # without one: equal for equal weights
    quantized: frozenset[str] = frozenset()  # names of tensors that a checkpoint has quantized already


class ModelWeights:
    """A model's weights, on their device unless they were moved to the host or dropped.

    On a CPU they are on the host already, and stay where they are unless they are dropped. Whatever replaces
    them writes where they lie, so that all who read them read on.
    """

    def __init__(self, weights: LoadedWeights, source: WeightSource) -> None:
        self.weights, self.source = weights, source
        tensors = [*weights.by_name.values()]
        self._memory = TensorMemory(tensors)
        self._is_on_host = weights.device.type == "cpu"
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
        """Have them on the device again; whatever interrupts it, it can be called again.

        LoadError where they were dropped, and cannot be read again.
        """
        if self.place == "device":
            return
        if self.place == "nowhere" and self.source.read is None:
            raise LoadError("the weights came by update_weights() and were dropped; give all of them again")
        self._memory.take()
        if self.place == "host":
            for view, (slab, start, size) in self._moves():
                view.copy_(slab[start : start + size], non_blocking=True)
            torch.cuda.synchronize()
        elif self.source.read is not None:
            self.source.read(self.weights)
        self.place = "device"

    def replace(self, given: Mapping[str, Tensor]) -> None:
        """Fill them with tensors by the names that checkpoints use; what is not given stays as it is.

        All are checked before any is written: RequestError, UnsupportedError. Where they were dropped all
        must be given, and are on the device then.
        """
        slots = self.check(headers_of(given))
        check_values(self.weights, slots, given)
        with self._writing():
            write(self.weights, slots, given)
        self.source = replace(self.source, digest=digest_of(self.weights), folder=None, read=None)

    def check(self, headers: Mapping[str, Header]) -> dict[str, Slot]:
        """Where each of these belongs; raises what replace() would of names, shapes and dtypes."""
        is_whole = self.place == "nowhere"
        return check_update(self.weights, headers, self.source.quantized, is_whole=is_whole)

    def read_from(self, source: WeightSource) -> None:
        """Fill them from another source; LoadError where it is damaged."""
        assert source.read is not None, "a source that cannot be read"
        with self._writing():
            source.read(self.weights)
        self.source = source

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """They are nowhere until the block ends on all ranks; where one fails they are read again."""
        was_there = self.place != "nowhere"
        if was_there:
            self.come()
        self._memory.take()
        self.place = "nowhere"
        try:
            failure = None
            try:
                yield
            except Exception as error:
                failure = error
            _agree(failure)
        except Exception:
            if was_there and self.source.read is not None:
                self.come()
            raise
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


def _agree(failure: Exception | None) -> None:
    """Raise what has failed here, or LoadError for what has on another rank, so that all go one way."""
    said = said_by_all(current_world(), None if failure is None else shown(failure, 300))
    if failure is not None:
        raise failure
    for rank, words in enumerate(said):
        if words is not None:
            raise LoadError(f"rank {rank} could not take these weights: {words}")


def digest_of(weights: LoadedWeights) -> str:
    """Returns a digest of samples of all weights, as they are kept."""
    digest = hashlib.sha256()
    for name, tensor in weights.by_name.items():
        sampled = tensor.view(-1)[
            :: max(1, tensor.numel() // NUM_SAMPLES)
        ].clone()  # numpy would keep its memory
        digest.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        digest.update(bytes(sampled.cpu().view(torch.uint8).numpy()))
    return digest.hexdigest()
