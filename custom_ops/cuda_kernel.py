"""What CUDA providers share: dtype codes, and the launch of a kernel that takes one packed argument."""

import ctypes
import struct

import torch

from ..common.errors import KernelLaunchError
from .build_cuda import load_cuda_kernel

DEVICES = frozenset({"cuda"})
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/include/launch.cuh has the same codes


class CudaKernel:
    """The entry point of csrc/<op>/cuda.cu, called with a device and the fields of its arguments struct.

    The stream, which is the last field, is the device's current one; nothing waits and nothing is allocated,
    so a call can be captured in a CUDA graph.
    """

    def __init__(self, op: str, layout: str) -> None:
        library = load_cuda_kernel(op)
        self._op = op
        self._arguments = struct.Struct(f"{layout}q")
        size = getattr(library, f"{op}_arguments_size")
        size.restype = ctypes.c_int64
        assert size() == self._arguments.size
        self._entry = getattr(library, op)
        self._entry.argtypes, self._entry.restype = [ctypes.c_char_p], ctypes.c_int
        self._describe = library.lamina_error_string
        self._describe.argtypes, self._describe.restype = [ctypes.c_int], ctypes.c_char_p

    def __call__(self, device: torch.device, *fields: float) -> None:
        arguments = self._arguments.pack(*fields, torch.cuda.current_stream(device).cuda_stream)
        if device.index == torch.cuda.current_device():
            error = self._entry(arguments)
        else:
            with torch.cuda.device(device):
                error = self._entry(arguments)
        if error:
            text = self._describe(error).decode()
            raise KernelLaunchError(f"{self._op}: {text} (CUDA error {error}), perhaps of an earlier kernel")
