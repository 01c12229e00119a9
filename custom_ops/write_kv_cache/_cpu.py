"""The C++ kernel of lamina::write_kv_cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.cpu_kernel import DEVICES, CpuKernel
from .._shared.fp8 import FP8
from .._shared.fp8_cache import narrowed
from .._shared.registry import Provider
from .int8_rows import INT8

_NOT_CONTIGUOUS = -2
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/write_kv_cache/cpu.cpp has the same
MOVED = -1  # rows are as the cache stores them
FIRST_CODES = {FP8: 0, INT8: len(CODES)}


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CpuKernel("write_kv_cache", "27q2d", moves_bytes=True)  # struct WriteKvCacheArguments

    def write_kv_cache(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        code = MOVED
        if key_cache.dtype in FIRST_CODES and key_cache.dtype != key.dtype:
            key, value = narrowed(key), narrowed(value)
            code = FIRST_CODES[key_cache.dtype] + CODES[key.dtype]
        result = kernel(
            None,
            *(key.data_ptr(), *key.stride()),
            *(value.data_ptr(), *value.stride()),
            *(key_cache.data_ptr(), *key_cache.stride()),
            *(value_cache.data_ptr(), *value_cache.stride()),
            *(slot_mapping.data_ptr(), *slot_mapping.shape),
            *(*key_cache.shape[:3], key.shape[2]),
            *(key.element_size(), torch.get_num_threads()),
            *(code, key_scale, value_scale),
        )
        if result == _NOT_CONTIGUOUS:
            raise ShapeError("write_kv_cache: wanted tensors whose last dimension is contiguous")
        if result >= 0:
            got = f"slot_mapping[{result}] is {slot_mapping[result].item()}"
            raise ShapeError(f"write_kv_cache: {got}; wanted less than {key_cache[..., 0, 0].numel()}")

    return write_kv_cache


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES)
