"""The CUDA kernel of lamina::rms_norm."""

from collections.abc import Callable

from torch import Tensor

from ..cuda_kernel import DEVICES, DTYPES, CudaKernel
from ..layout import as_rows, num_rows
from ..registry import Provider


def load() -> Callable[..., Tensor]:
    """The kernel behind the op's signature."""
    kernel = CudaKernel("rms_norm", "6qdq")  # struct RmsNormArguments

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
