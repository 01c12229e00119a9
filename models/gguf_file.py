"""Reads a GGUF file: metadata, where each tensor lies, and the numbers that it holds."""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..common.errors import LoadError, UnsupportedError
from .fields import Fields

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
VERSIONS = (2, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """A tensor of the file as [rows, bytes per row], and its shape with the rows first."""

    shape: tuple[int, ...]
    quantization: int  # number of the GGML quantization type
    rows: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFFile:
    """The content of a file; tensors are views of it."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Parse a file's header; LoadError where it is damaged or cut short."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            cursor = _Cursor(mapped)
            metadata, infos = _header(cursor, path)
    except (struct.error, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise LoadError(f"{path} is no GGUF file, or damaged: {error!r}; download it again") from error
    alignment = Fields(metadata, str(path)).integer("general.alignment", 32)
    start = -(-cursor.offset // alignment) * alignment
    data = np.memmap(path, dtype=np.uint8, mode="r")
    tensors = {name: _tensor(path, name, data[start:], *info) for name, info in infos.items()}
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


class _Cursor:
    """A place in the file that moves on with what is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return value

    def text(self) -> str:
        length = self.scalar("<Q")
        content = self.data[self.offset : self.offset + length]
        if len(content) != length:
            raise ValueError("a string reaches beyond the end of the file")
        self.offset += length
        return content.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            element, count = self.scalar("<I"), self.scalar("<Q")
            if count > len(self.data):
                raise ValueError("an array is longer than the file")
            return [self.value(element) for _ in range(count)]
        return self.scalar(SCALARS[kind])


def _header(
    cursor: _Cursor, path: Path
) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
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
        metadata[name] = cursor.value(cursor.scalar("<I"))
    infos = {}
    for _ in range(num_tensors):
        name = cursor.text()
        columns_first = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
        infos[name] = (tuple(reversed(columns_first)), cursor.scalar("<I"), cursor.scalar("<Q"))
    return metadata, infos


def _tensor(
    path: Path, name: str, data: npt.NDArray[np.uint8], shape: tuple[int, ...], quantization: int, offset: int
) -> GGUFTensor:
    from gguf.constants import GGML_QUANT_SIZES

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
    content = data[offset : offset + num_rows * row_bytes]
    if 0 in shape:
        raise LoadError(f"{path} is damaged: {name} is {list(shape)}, nothing at all; download it again")
    if len(content) != num_rows * row_bytes:
        raise LoadError(f"{path} is cut short: {name} lies beyond its end; download it again")
    return GGUFTensor(shape=shape, quantization=quantization, rows=content.reshape(num_rows, row_bytes))


def chunks(tensor: GGUFTensor, row_order: npt.NDArray[np.int64] | None = None) -> Iterator[Tensor]:
    """The float32 rows of a tensor in that order, a bounded number at a time."""
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.quantization)
    rows = tensor.rows
    if row_order is not None:
        rows = rows.reshape(tensor.shape[0], -1)[row_order].reshape(rows.shape)
    step = max(1, CHUNK_ELEMENTS // tensor.shape[-1])
    for start in range(0, len(rows), step):
        try:
            values = gguf.dequantize(np.array(rows[start : start + step]), kind)
        except NotImplementedError as error:  # of integers and float64, which no model's weights are
            raise UnsupportedError(f"a tensor has GGML type {kind.name}: {error}") from error
        yield torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
