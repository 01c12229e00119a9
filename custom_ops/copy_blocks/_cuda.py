"""The CUDA kernel of lamina::copy_blocks."""

from collections.abc import Callable

from torch import Tensor

from .._shared.cuda_kernel import DEVICES, CudaKernel
from .._shared.registry import Provider


def load() -> Callable[..., None]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("copy_blocks", "8q")  # struct CopyBlocksArguments

    def copy_blocks(key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor) -> None:
        size, block_mapping = key_cache.element_size(), block_mapping.contiguous()
        kernel(
            key_cache.device,
            *(key_cache.data_ptr(), key_cache.stride(0) * size),
            *(value_cache.data_ptr(), value_cache.stride(0) * size),
            *(block_mapping.data_ptr(), block_mapping.shape[0]),
            *(key_cache.shape[1:].numel() * size, size),
        )

    return copy_blocks


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES)
