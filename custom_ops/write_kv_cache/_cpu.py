"""The C++ kernel of lamina::write_kv_cache."""

import ctypes
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ...common.errors import ShapeError
from ..build import load_kernel
from ..registry import Provider

_ARGUMENTS = struct.Struct("22q")  # struct WriteKvCacheArguments


def load() -> Callable[..., None]:
    """The kernel behind the op's signature."""
    library = load_kernel("write_kv_cache")
    assert library.write_kv_cache_arguments_size() == _ARGUMENTS.size
    entry = library.write_kv_cache
    entry.argtypes, entry.restype = [ctypes.c_char_p], ctypes.c_int64

    def write_kv_cache(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
        arguments = _ARGUMENTS.pack(
            *(key.data_ptr(), *key.stride()[:2]),
            *(value.data_ptr(), *value.stride()[:2]),
            *(key_cache.data_ptr(), *key_cache.stride()[:3]),
            *(value_cache.data_ptr(), *value_cache.stride()[:3]),
            *(slot_mapping.data_ptr(), len(slot_mapping)),
            *(num_kv_heads, head_dim, num_blocks, block_size),
            *(key.element_size(), torch.get_num_threads()),
        )
        beyond = entry(arguments)
        if beyond >= 0:
            got = f"slot_mapping[{beyond}] is {slot_mapping[beyond].item()}"
            raise ShapeError(f"write_kv_cache: {got}; wanted less than {num_blocks * block_size}")

    return write_kv_cache


PROVIDER = Provider(name="cpu", load=load, devices=frozenset({"cpu"}))
