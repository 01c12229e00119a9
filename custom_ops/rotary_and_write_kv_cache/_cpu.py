"""The C++ kernel of lamina::rotary_and_write_kv_cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel
from .._shared.fp8 import FP8
from .._shared.layout import check_dense_heads, with_dense_heads
from .._shared.registry import Provider
from ..write_kv_cache.int8_rows import INT8

STORED = {FP8: 1, INT8: 2}  # csrc/rotary_and_write_kv_cache/cpu.cpp has the same; others are as keys


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    kernel = CpuKernel("rotary_and_write_kv_cache", "29q2d")  # struct RotaryAndWriteKvCacheArguments

    def rotary_and_write_kv_cache(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Tensor:
        out = query.new_empty(query.shape)
        query, key, value = with_dense_heads(query), with_dense_heads(key), with_dense_heads(value)
        check_dense_heads("rotary_and_write_kv_cache", key_cache, value_cache)
        cos, sin = cos.contiguous(), sin.contiguous()
        num_tokens, num_heads, head_dim = query.shape
        num_blocks, block_size, num_kv_heads, _ = key_cache.shape
        result = kernel(
            query.dtype,
            *(query.data_ptr(), *query.stride()[:2]),
            *(key.data_ptr(), *key.stride()[:2]),
            *(value.data_ptr(), *value.stride()[:2]),
            *(cos.data_ptr(), sin.data_ptr(), out.data_ptr()),
            *(key_cache.data_ptr(), *key_cache.stride()[:3]),
            *(value_cache.data_ptr(), *value_cache.stride()[:3]),
            *(slot_mapping.data_ptr(), num_tokens, num_heads, num_kv_heads, head_dim),
            *(num_blocks, block_size, torch.get_num_threads()),
            *(STORED.get(key_cache.dtype, 0), key_scale, value_scale),
        )
        if result >= 0:
            got = f"slot_mapping[{result}] is {slot_mapping[result].item()}"
            raise ShapeError(f"rotary_and_write_kv_cache: {got}; wanted less than {num_blocks * block_size}")
        return out

    return rotary_and_write_kv_cache


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
