"""The CUDA kernel of lamina::rms_norm."""

from collections.abc import Callable

from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import as_rows, num_rows
from .._shared.registry import Provider


def load(op: str = "rms_norm") -> Callable[..., Tensor]:
    """Build or load the kernel of an op of a norm alone; the op's function on it."""
    kernel = CudaKernel(op, "6qdq")  # struct NormArguments

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = x.new_empty(x.shape)
        x, x_stride = as_rows(x)
        weight = weight.contiguous()
        kernel(
            x.device,
            *(x.data_ptr(), weight.data_ptr(), out.data_ptr()),
            *(num_rows(x), x.shape[-1], x_stride),
            *(eps, DTYPES[x.dtype]),
        )
        return out

    return rms_norm


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
