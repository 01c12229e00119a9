"""The CUDA kernel of lamina::rms_norm_quantized."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import as_rows
from .._shared.quantized import CODES, NARROW, fits_vectors, new_quantized
from .._shared.registry import Provider
from ..linear._cuda import check_capability
from . import _composed

MOST_COLUMNS = 1 << 14  # of a row that a thread block holds


def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """Build or load the kernel; the op's function on it."""
    check_capability("rms_norm_quantized")
    kernel = CudaKernel("rms_norm_quantized", "7qd4q")  # struct QuantizedNormArguments

    def rms_norm_quantized(
        x: Tensor, weight: Tensor, eps: float, group: int, dtype: torch.dtype, zero_centred: bool = False
    ) -> tuple[Tensor, Tensor]:
        x, x_stride = as_rows(x)
        weight = weight.contiguous()
        if not fits_vectors(MOST_COLUMNS, x, weight[None]):
            return _composed.rms_norm_quantized(x, weight, eps, group, dtype, zero_centred)
        values, scale = new_quantized(x, x.shape[1], group, dtype)
        kernel(
            x.device,
            *(x.data_ptr(), weight.data_ptr(), values.data_ptr(), scale.data_ptr()),
            *(*x.shape, x_stride, eps, group, CODES[dtype], zero_centred, DTYPES[x.dtype]),
        )
        return values, scale

    return rms_norm_quantized


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=NARROW)
