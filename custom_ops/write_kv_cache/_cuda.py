"""The CUDA kernel of lamina::write_kv_cache."""

from collections.abc import Callable

from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.fp8 import FP8
from .._shared.fp8_cache import narrowed
from .._shared.layout import check_dense_heads, with_dense_heads
from .._shared.registry import Provider

MOVED = -1  # rows are as the cache stores them


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("write_kv_cache", "21q2d")  # struct WriteKvCacheArguments

    def write_kv_cache(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        is_fp8 = key_cache.dtype == FP8
        if is_fp8:
            key, value = narrowed(key), narrowed(value)
        key, value = with_dense_heads(key), with_dense_heads(value)
        check_dense_heads("write_kv_cache", key_cache, value_cache)
        num_tokens, num_kv_heads, head_dim = key.shape
        kernel(
            key.device,
            *(key.data_ptr(), *key.stride()[:2]),
            *(value.data_ptr(), *value.stride()[:2]),
            *(key_cache.data_ptr(), *key_cache.stride()[:3]),
            *(value_cache.data_ptr(), *value_cache.stride()[:3]),
            *(slot_mapping.data_ptr(), num_tokens, num_kv_heads, head_dim),
            *(key_cache.shape[1], key.element_size()),
            *(DTYPES[key.dtype] if is_fp8 else MOVED, key_scale, value_scale),
        )

    return write_kv_cache


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES)
