"""The C++ kernel of lamina::write_kv_cache."""

import ctypes
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ...common.errors import ShapeError
from ..build import load_kernel
from ..registry import Provider

_ARGUMENTS = struct.Struct("26q")  # struct WriteKvCacheArguments

_NOT_CONTIGUOUS = -2


def load() -> Callable[..., None]:
    """The kernel behind the op's signature."""
    library = load_kernel("write_kv_cache")
    assert library.write_kv_cache_arguments_size() == _ARGUMENTS.size
    entry = library.write_kv_cache
    entry.argtypes, entry.restype = [ctypes.c_char_p], ctypes.c_int64

    def write_kv_cache(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        arguments = _ARGUMENTS.pack(
            *(key.data_ptr(), *key.stride()),
            *(value.data_ptr(), *value.stride()),
            *(key_cache.data_ptr(), *key_cache.stride()),
            *(value_cache.data_ptr(), *value_cache.stride()),
            *(slot_mapping.data_ptr(), *slot_mapping.shape),
            *key_cache.shape,
            *(key.element_size(), torch.get_num_threads()),
        )
        result = entry(arguments)
        if result == _NOT_CONTIGUOUS:
            raise ShapeError("write_kv_cache: wanted tensors whose last dimension is contiguous")
        if result >= 0:
            got = f"slot_mapping[{result}] is {slot_mapping[result].item()}"
            raise ShapeError(f"write_kv_cache: {got}; wanted less than {key_cache[..., 0, 0].numel()}")

    return write_kv_cache


PROVIDER = Provider(name="cpu", load=load, devices=frozenset({"cpu"}))
