"""What a safetensors file begins with: the name, dtype, shape and place of every tensor."""

import json
import math
import struct
from collections.abc import Mapping

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
