"""What providers with a C++ kernel share: an entry point a dtype that takes one packed argument."""

import ctypes
import struct

import torch
from torch import Tensor

from .build import load_kernel
from .call_capture import add_packed_call

DEVICES = frozenset({"cpu"})
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class CpuKernel:
    """The entry points of csrc/<op>/cpu.cpp, called with a dtype and the fields of its arguments struct.

    One packed argument costs a tenth of as many converted by ctypes. A kernel that only moves bytes has one
    entry point, for the dtype None.
    """

    def __init__(self, op: str, layout: str, *, moves_bytes: bool = False) -> None:
        library = load_kernel(op)
        self._arguments = struct.Struct(layout)
        size = getattr(library, f"{op}_arguments_size")
        size.restype = ctypes.c_int64
        assert size() == self._arguments.size
        self.library = library
        names: dict[torch.dtype | None, str] = {dtype: f"{op}_{name}" for dtype, name in DTYPES.items()}
        names = {None: op} if moves_bytes else names
        self._entries = {dtype: getattr(library, name) for dtype, name in names.items()}
        for entry in self._entries.values():
            entry.argtypes, entry.restype = [ctypes.c_char_p], ctypes.c_int64

    def __call__(self, dtype: torch.dtype | None, *fields: float) -> int:
        entry, packed = self._entries[dtype], self._arguments.pack(*fields)
        result: int = entry(packed)
        add_packed_call(entry, packed, result)
        return result


def by_rows(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
