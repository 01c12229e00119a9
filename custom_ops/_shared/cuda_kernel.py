"""What CUDA providers share: dtype codes, and the launch of a kernel that takes one packed argument."""

import ctypes
import struct
from typing import Any

import torch

from ...common.errors import KernelLaunchError
from .build_cuda import load_cuda_kernel

Entry = Any  # a function of a library loaded by ctypes
DEVICES = frozenset({"cuda"})
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/include/launch.cuh has the same codes


class CudaKernel:
    """The entry point of csrc/<op>/<source>.cu, called with a device and the fields of its arguments struct.

    The stream, which is the last field, is the device's current one; nothing waits and nothing is allocated,
    so a call can be captured in a CUDA graph.
    """

    def __init__(self, op: str, layout: str, source: str = "cuda") -> None:
        self._op, self._source = op, source
        self._arguments = struct.Struct(f"{layout}q")
        self._entries: dict[int, Entry] = {}  # by device: two of them may differ in what they execute
        self._entry_of(torch.cuda.current_device())

    def __call__(self, device: torch.device, *fields: float) -> None:
        arguments = self._arguments.pack(*fields, torch.cuda.current_stream(device).cuda_stream)
        entry = self._entries.get(device.index) or self._entry_of(device.index)
        if device.index == torch.cuda.current_device():
            error = entry(arguments)
        else:
            with torch.cuda.device(device):
                error = entry(arguments)
        if error:
            text = self._describe(error).decode()
            raise KernelLaunchError(f"{self._op}: {text} (CUDA error {error}), perhaps of an earlier kernel")

    def _entry_of(self, device: int) -> "Entry":
        with torch.cuda.device(device):
            library = load_cuda_kernel(self._op, self._source)
        size = getattr(library, f"{self._op}_arguments_size")
        size.restype = ctypes.c_int64
        assert size() == self._arguments.size
        entry: Entry = getattr(library, self._op)
        entry.argtypes, entry.restype = [ctypes.c_char_p], ctypes.c_int
        self._describe = library.lamina_error_string
        self._describe.argtypes, self._describe.restype = [ctypes.c_int], ctypes.c_char_p
        self._entries[device] = entry
        return entry
