"""Reads a GGUF file: metadata, where each tensor lies, and the numbers that it holds."""

import itertools
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from ...common.errors import LoadError, UnsupportedError
from ..fields import Fields

# GGUF's value types by number; 8 is a string, 9 an array.
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9
CHUNK_ELEMENTS = 1 << 24  # dequantized at a time
BLOCK = 1 << 22  # bytes read at a time
VERSIONS = (2, 3)


class GGUFContent:
    """A file held open: what is read is of one file, whatever becomes of its name, and never mapped, since a
    mapped file that is cut short ends the process. Raises LoadError for what cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.facts = os.fstat(self.descriptor)
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error}") from error
        weakref.finalize(self, os.close, self.descriptor)
        self.size = self.facts.st_size

    def read(self, start: int, count: int) -> bytearray:
        """Bytes of the file, as many as asked for."""
        data = bytearray(count)
        left = memoryview(data)
        try:
            while left and (num_read := os.preadv(self.descriptor, [left], start)):
                start, left = start + num_read, left[num_read:]
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read: {error}") from error
        if left:
            raise LoadError(f"{self.path} was cut short while it was read; start again once it is whole")
        return data

    def digest(self) -> str:
        """The hash of the whole file."""
        digest = xxhash.xxh3_128()
        for start in range(0, self.size, BLOCK):
            digest.update(self.read(start, min(BLOCK, self.size - start)))
        return str(digest.hexdigest())

    def require(self, digest: str) -> None:
        """LoadError where the file was written to since it was opened, or has another hash."""
        now, before = os.fstat(self.descriptor), self.facts
        is_same = (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        if not is_same or self.digest() != digest:
            raise LoadError(
                f"{self.path} was changed while it was read, and nothing of it is kept; start again once it "
                "is whole"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """A tensor's shape with the rows first, and where its rows lie in the file."""

    shape: tuple[int, ...]
    quantization: int  # number of the GGML quantization type
    content: GGUFContent
    start: int  # bytes
    num_rows: int
    row_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_rows * self.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFFile:
    """What a file's header says."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Parse a file's header; LoadError where it is damaged or cut short."""
    return read_header(GGUFContent(path))


def read_header(content: GGUFContent) -> GGUFFile:
    """The header of an open file; LoadError where it is damaged or cut short."""
    path, cursor = content.path, _Cursor(content)
    try:
        metadata, infos = _header(cursor, path)
    except (struct.error, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise LoadError(f"{path} is no GGUF file, or damaged: {error!r}; download it again") from error
    alignment = Fields(metadata, str(path)).integer("general.alignment", 32)
    start = -(-cursor.offset // alignment) * alignment
    tensors = {name: _tensor(content, name, start, *info) for name, info in infos.items()}
    _refuse_overlaps(path, tensors)
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


def _refuse_overlaps(path: Path, tensors: Mapping[str, GGUFTensor]) -> None:
    """A byte belongs to one tensor: else a small file could ask for any amount of weights."""
    in_order = sorted(tensors, key=lambda name: tensors[name].start)
    for name, following in itertools.pairwise(in_order):
        if tensors[name].end > tensors[following].start:
            raise LoadError(
                f"{path} is damaged: {name} and {following} lie over each other; download it again"
            )


class _Cursor:
    """A place in the file that moves on with what is read; the file is read so far ahead."""

    def __init__(self, content: GGUFContent) -> None:
        self.content = content
        self.data = bytearray()
        self.offset = 0

    def need(self, count: int) -> None:
        """Have the next bytes in memory."""
        end = self.offset + count
        if end > self.content.size:
            raise ValueError("it ends within its header")
        if end > len(self.data):
            more = min(max(end - len(self.data), BLOCK), self.content.size - len(self.data))
            self.data += self.content.read(len(self.data), more)

    def scalar(self, layout: str) -> Any:
        self.need(struct.calcsize(layout))
        (value,) = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return value

    def text(self) -> str:
        length = self.scalar("<Q")
        self.need(length)
        content = self.data[self.offset : self.offset + length]
        self.offset += length
        return content.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            element, count = self.scalar("<I"), self.scalar("<Q")
            if count > self.content.size:
                raise ValueError("an array is longer than the file")
            return [self.value(element) for _ in range(count)]
        return self.scalar(SCALARS[kind])


def _header(
    cursor: _Cursor, path: Path
) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
    cursor.need(4)
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.offset = 4
    version = cursor.scalar("<I")
    if version not in VERSIONS:
        raise UnsupportedError(f"{path} is GGUF version {version}; read are versions 2 and 3, little-endian")
    num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {}
    for _ in range(num_values):
        name = cursor.text()
        if name in metadata:
            raise ValueError(f"{name[:100]!r} is there twice")
        metadata[name] = cursor.value(cursor.scalar("<I"))
    infos = {}
    for _ in range(num_tensors):
        name = cursor.text()
        if name in infos:
            raise ValueError(f"{name[:100]!r} is there twice")
        columns_first = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
        infos[name] = (tuple(reversed(columns_first)), cursor.scalar("<I"), cursor.scalar("<Q"))
    return metadata, infos


def _tensor(
    content: GGUFContent, name: str, start: int, shape: tuple[int, ...], quantization: int, offset: int
) -> GGUFTensor:
    from gguf.constants import GGML_QUANT_SIZES

    path = content.path
    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    if quantization not in sizes:
        raise UnsupportedError(
            f"{name} in {path} has GGML type {quantization}, which the gguf package does not know"
        )
    block_elements, block_bytes = sizes[quantization]
    if len(shape) not in (1, 2) or shape[-1] % block_elements:
        raise UnsupportedError(
            f"{name} in {path} is {list(shape)}; wanted rows of {block_elements} n numbers"
        )
    num_rows, row_bytes = (shape[0] if len(shape) == 2 else 1), shape[-1] // block_elements * block_bytes
    if 0 in shape:
        raise LoadError(f"{path} is damaged: {name} is {list(shape)}, nothing at all; download it again")
    tensor = GGUFTensor(
        shape=shape,
        quantization=quantization,
        content=content,
        start=start + offset,
        num_rows=num_rows,
        row_bytes=row_bytes,
    )
    if tensor.end > content.size:
        raise LoadError(f"{path} is cut short: {name} lies beyond its end; download it again")
    return tensor


def chunks(tensor: GGUFTensor, row_order: npt.NDArray[np.int64] | None = None) -> Iterator[Tensor]:
    """The float32 rows of a tensor in that order, a bounded number at a time."""
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.quantization)
    for rows in row_chunks(tensor, row_order):
        try:
            values = gguf.dequantize(rows, kind)
        except NotImplementedError as error:  # of integers and float64, which no model's weights are
            raise UnsupportedError(f"a tensor has GGML type {kind.name}: {error}") from error
        yield torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def row_chunks(
    tensor: GGUFTensor, row_order: npt.NDArray[np.int64] | None
) -> Iterator[npt.NDArray[np.uint8]]:
    """The tensor as [rows, bytes per row], a bounded number at a time."""
    step = max(1, CHUNK_ELEMENTS // tensor.shape[-1])
    if row_order is not None:
        rows = _rows(tensor, 0, tensor.num_rows)
        rows = rows.reshape(tensor.shape[0], -1)[row_order].reshape(rows.shape)
        yield from (np.array(rows[start : start + step]) for start in range(0, tensor.num_rows, step))
        return
    for start in range(0, tensor.num_rows, step):
        yield _rows(tensor, start, min(step, tensor.num_rows - start))


def _rows(tensor: GGUFTensor, first: int, count: int) -> npt.NDArray[np.uint8]:
    data = tensor.content.read(tensor.start + first * tensor.row_bytes, count * tensor.row_bytes)
    return np.frombuffer(data, dtype=np.uint8).reshape(count, tensor.row_bytes)
