"""The CUDA kernel of lamina::lora."""

from collections.abc import Callable, Sequence

from torch import Tensor

from .._shared.cpu_kernel import by_rows
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.registry import Provider
from ._cpu import padded


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("lora", "18q")  # struct LoraArguments

    def lora(
        y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
    ) -> Tensor:
        out, y, x = y.new_empty(y.shape), by_rows(y), by_rows(x)
        kernel(
            y.device,
            *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), a.data_ptr(), b.data_ptr()),
            *(scales.data_ptr(), slots.data_ptr(), out.data_ptr(), len(y), len(a), x.shape[1], b.shape[2]),
            *(*padded(rows), DTYPES[y.dtype]),
        )
        return out

    return lora


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
