"""The CUDA kernel of lamina::add_rms_norm."""

from collections.abc import Callable

from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import as_rows, num_rows
from .._shared.registry import Provider


def load(op: str = "add_rms_norm") -> Callable[..., tuple[Tensor, Tensor]]:
    """Build or load the kernel of an op of a sum and its norm; the op's function on it."""
    kernel = CudaKernel(op, "9qd2q")  # struct SumAndNormArguments

    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, unrounded: bool = False
    ) -> tuple[Tensor, Tensor]:
        out, total = x.new_empty(x.shape), x.new_empty(x.shape)
        x, x_stride = as_rows(x)
        residual, residual_stride = as_rows(residual)
        weight = weight.contiguous()
        kernel(
            x.device,
            *(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr()),
            *(num_rows(x), x.shape[-1], x_stride, residual_stride),
            *(eps, unrounded, DTYPES[x.dtype]),
        )
        return out, total

    return add_rms_norm


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
