"""The CUDA kernel of lamina::lora."""

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from .._shared.cpu_kernel import by_rows
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.registry import Provider
from ._cpu import padded


@functools.cache
def find_kernel() -> CudaKernel:
    """Build or load the kernel, once."""
    return CudaKernel("lora", "19q")  # struct LoraArguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    find_kernel()
    return launch


def launch(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
    *,
    blocks_beside: int = 0,
) -> Tensor:
    """The op, as op.py states it.

    blocks_beside: how many blocks find room beside the kernel ahead, which promises that x, whose rows are
    then contiguous, is complete when this one begins; 0: it does not.
    """
    out, y, x = y.new_empty(y.shape), by_rows(y), by_rows(x)
    find_kernel()(
        y.device,
        *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), a.data_ptr(), b.data_ptr()),
        *(scales.data_ptr(), slots.data_ptr(), out.data_ptr(), len(y), len(a), x.shape[1], b.shape[2]),
        *(*padded(rows), DTYPES[y.dtype], blocks_beside),
    )
    return out


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
