"""The CUDA kernel of lamina::lora."""

from collections.abc import Callable, Sequence

from torch import Tensor

from .._shared.cpu_kernel import by_rows
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.registry import Provider
from ._cpu import padded

VECTOR, EVEN = 16, 8  # bytes and elements that the kernels of clusters read at once


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    kernel = CudaKernel("lora", "18q")  # struct LoraArguments

    def lora(
        y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
    ) -> Tensor:
        out, y, x = y.new_empty(y.shape), by_rows(y), by_rows(x)
        kernel(y.device, *fields(y, x, a, b, scales, slots, rows, out))
        return out

    return lora


def fields(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
    out: Tensor,
) -> tuple[int, ...]:
    """struct LoraArguments but for the stream, of tensors whose rows are contiguous."""
    return (
        *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), a.data_ptr(), b.data_ptr()),
        *(scales.data_ptr(), slots.data_ptr(), out.data_ptr(), len(y), len(a), x.shape[1], b.shape[2]),
        *(*padded(rows), DTYPES[y.dtype]),
    )


def is_for_clusters(x: Tensor, a: Tensor, b: Tensor, most_rank: int) -> bool:
    """Whether kernels of clusters can read these: in vectors, with room for sums of so many ranks."""
    rank, places = b.shape[2], x.data_ptr() | a.data_ptr() | b.data_ptr()
    is_even = not any(size % EVEN for size in (x.shape[1], x.stride(0), rank))
    return is_even and places % VECTOR == 0 and rank <= most_rank


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
