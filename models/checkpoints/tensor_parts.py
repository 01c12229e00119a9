"""Which rows and columns of a checkpoint's tensors are read: as views of a file, or where they lie."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...common.errors import LoadError
from ..config import DTYPES
from ..sharding import Run
from .read_ahead import Extent
from .safetensors_header import DTYPE_NAMES, num_bytes, read_entries
from .shards import Header

DTYPES_OF_FLOATS = {DTYPE_NAMES[dtype]: dtype for dtype in DTYPES.values()}


class Part(NamedTuple):
    """Of a tensor in a file: all of it, or rows, and columns, that are wanted."""

    name: str
    run: Run | None = None
    columns: tuple[int, int] | None = None
    is_last: bool = True  # of this tensor

    def read(self, file: Any) -> Tensor:
        """A view of an open file."""
        if self.run is None:
            whole: Tensor = file.get_tensor(self.name)
            return whole
        rows = slice(self.run.start, self.run.start + self.run.num_rows)
        own: Tensor = file.get_slice(self.name)[rows]
        return own if self.columns is None else own.narrow(1, *self.columns)


def cut(part: Part, header: Header, most_bytes: int) -> list[Part]:
    """Runs of a part's rows, each of so many bytes at most; none where a row has more, or is no float's."""
    dtype = DTYPES_OF_FLOATS.get(header.dtype)
    if part.run is None or dtype is None or num_bytes(dtype, header.shape[1:]) > most_bytes:
        return []
    (start, num_rows, to), step = part.run, most_bytes // max(1, num_bytes(dtype, header.shape[1:]))
    return [
        part._replace(
            run=Run(start + first, min(step, num_rows - first), to + first),
            is_last=part.is_last and first + step >= num_rows,
        )
        for first in range(0, max(1, num_rows), step)
    ]


def extents(path: Path, parts: Iterable[Part], headers: Mapping[str, Header]) -> Iterator[Extent]:
    """Where the rows of each part lie in a file that safetensors has open, all columns of them.

    LoadError where a tensor is not what the file's header said when the checkpoint was read.
    """
    entries = read_entries(path)
    for name, run, *_ in parts:
        header, entry = headers[name], entries.get(name)
        if entry is None or Header(entry.shape, entry.dtype) != header:
            wanted = f"{list(header.shape)} of {header.dtype}, as it was; load the checkpoint anew"
            raise LoadError(f"{path} has changed: {name} is {entry and list(entry)}; wanted {wanted}")
        assert run is not None, "a part that was not cut"
        dtype, row = DTYPES_OF_FLOATS[header.dtype], header.shape[1:]
        start = entry.offset + run.start * num_bytes(dtype, row)
        yield Extent(start, (run.num_rows, *row), dtype)
