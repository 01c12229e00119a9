"""The CUDA kernel of lamina::add_rms_norm_quantized."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import as_rows
from .._shared.quantized import CODES, NARROW, fits_vectors, new_quantized
from .._shared.registry import Provider
from ..linear._cuda import check_capability
from ..rms_norm_quantized._cuda import MOST_COLUMNS
from . import _composed


def load() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Build or load the kernel; the op's function on it."""
    check_capability("add_rms_norm_quantized")
    kernel = CudaKernel("add_rms_norm_quantized", "10qd5q")  # struct QuantizedSumAndNormArguments

    def add_rms_norm_quantized(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        group: int,
        dtype: torch.dtype,
        zero_centred: bool = False,
        unrounded: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, x_stride = as_rows(x)
        residual, residual_stride = as_rows(residual)
        weight = weight.contiguous()
        if not fits_vectors(MOST_COLUMNS, x, residual, weight[None]):
            return _composed.add_rms_norm_quantized(
                x, residual, weight, eps, group, dtype, zero_centred, unrounded
            )
        values, scale = new_quantized(x, x.shape[1], group, dtype)
        total = x.new_empty(x.shape)
        kernel(
            x.device,
            *(x.data_ptr(), residual.data_ptr(), weight.data_ptr()),
            *(values.data_ptr(), scale.data_ptr(), total.data_ptr()),
            *(*x.shape, x_stride, residual_stride),
            *(eps, group, CODES[dtype], zero_centred, unrounded, DTYPES[x.dtype]),
        )
        return values, scale, total

    return add_rms_norm_quantized


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=NARROW)
