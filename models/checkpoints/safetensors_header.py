"""What a safetensors file begins with: the name, dtype, shape and place of every tensor."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # of tensors that lie one behind the other

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}


class Entry(NamedTuple):
    """What a file says of a tensor, and the byte of the file that it begins at."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it
    offset: int


def read_entries(path: Path) -> dict[str, Entry]:
    """Every tensor of a file that safetensors has opened, which has checked what it begins with."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return {
        name: Entry(tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def header(layout: Layout) -> bytes:
    """The bytes before the tensors; the first one begins where they end."""
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + num_bytes(dtype, shape)
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """What a tensor takes."""
    return math.prod(shape) * dtype.itemsize
