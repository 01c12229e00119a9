"""Safetensors files written in any order: their headers first, then tensors, whole or some rows at a time."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...common.errors import StoreError
from ..checkpoints.safetensors_header import Layout, header, num_bytes
from ..checkpoints.shards import INDEX_NAME, SINGLE_NAME, listed

MAX_SHARD_BYTES = 5 * 10**9


class _Place(NamedTuple):
    file: FileIO
    offset: int


class ShardWriter:
    """A checkpoint's tensors, of which no more than what is being written is in memory.

    Files of at most `max_shard_bytes` each (a larger tensor has one of its own), with an index where there
    are several. StoreError where the disk is full, or refuses for another reason.
    """

    def __init__(self, folder: Path, layout: Layout, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._places: dict[str, _Place] = {}
        self._left = {name: num_bytes(*one) for name, one in layout.items()}
        self._files = ExitStack()
        self.num_bytes = sum(self._left.values())
        shards = list(_shards(layout, max_shard_bytes))
        self._folder, self._weight_map = folder, dict[str, str]()
        try:
            for index, names in enumerate(shards, start=1):
                path = folder / _file_name(index, len(shards))
                self._begin(path, {name: layout[name] for name in names})
        except BaseException:
            self._files.close()
            raise

    def _begin(self, path: Path, layout: Layout) -> None:
        """A file with its header, and a place for its tensors: wide ones first, so that each is aligned."""
        layout = dict(sorted(layout.items(), key=lambda named: -named[1][0].itemsize))
        beginning = header(layout)
        try:
            file = self._files.enter_context(FileIO(path, "wb"))
            _write_all(file, 0, beginning)
        except OSError as error:
            raise _unwritable(path, error) from error
        start = len(beginning)
        for name, one in layout.items():
            self._places[name], self._weight_map[name] = _Place(file, start), path.name
            start += num_bytes(*one)

    def write(self, name: str, rows: Tensor, first_row: int = 0) -> None:
        """Rows of a tensor from `first_row` on, in its layout's dtype."""
        data = rows.cpu().contiguous().flatten().view(torch.uint8).numpy().data
        file, offset = self._places[name]
        offset += first_row * (rows.nbytes // max(1, rows.shape[0]))
        try:
            _write_all(file, offset, data)
        except OSError as error:
            raise _unwritable(Path(file.name), error) from error
        self._left[name] -= rows.nbytes

    def finish(self) -> None:
        """Have all of it on the disk, and its index beside it. StoreError for a tensor that is not whole."""
        missing = [name for name, left in self._left.items() if left]
        if missing:
            raise StoreError(f"{self._folder} would lack what was never written: {listed(missing)}")
        try:
            for file in {place.file for place in self._places.values()}:
                os.fsync(file.fileno())
            self._files.close()
            if len(set(self._weight_map.values())) > 1:
                index = {"metadata": {"total_size": self.num_bytes}, "weight_map": self._weight_map}
                (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


def _shards(layout: Layout, most: int) -> Iterator[list[str]]:
    """The names of each file's tensors, in order."""
    names: list[str] = []
    held = 0
    for name, one in layout.items():
        size = num_bytes(*one)
        if names and held + size > most:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _file_name(index: int, count: int) -> str:
    return SINGLE_NAME if count == 1 else f"model-{index:05}-of-{count:05}.safetensors"


def _write_all(file: FileIO, offset: int, data: bytes | memoryview) -> None:
    """All of the bytes: one call of the system takes 2 GiB at most."""
    left = memoryview(data).cast("B")
    while left:
        count = os.pwrite(file.fileno(), left, offset)
        left, offset = left[count:], offset + count


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path} cannot be written: {error.strerror or error}; make room, or write elsewhere")
