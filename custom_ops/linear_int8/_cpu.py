"""The C++ kernel of lamina::linear_int8."""

import ctypes
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ..build import load_kernel
from ..registry import Provider

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

_ARGUMENTS = struct.Struct("10q")  # struct LinearInt8Arguments


def load() -> Callable[..., Tensor]:
    """The kernel behind the op's signature."""
    library = load_kernel("linear_int8")
    assert library.linear_int8_arguments_size() == _ARGUMENTS.size
    entries = {dtype: getattr(library, f"linear_int8_{name}") for dtype, name in NAMES.items()}
    for entry in entries.values():
        entry.argtypes, entry.restype = [ctypes.c_char_p], None

    def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        bias = None if bias is None else bias.contiguous()
        out = x.new_empty((x.shape[0], weight.shape[0]))
        entries[x.dtype](
            _ARGUMENTS.pack(
                *(x.data_ptr(), weight.data_ptr(), scale.data_ptr()),
                *(0 if bias is None else bias.data_ptr(), out.data_ptr()),
                *(x.stride(0), x.shape[0], *weight.shape, torch.get_num_threads()),
            )
        )
        return out

    return linear_int8


PROVIDER = Provider(name="cpu", load=load, devices=frozenset({"cpu"}), dtypes=frozenset(NAMES))
