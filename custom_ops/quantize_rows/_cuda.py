"""The CUDA kernel of lamina::quantize_rows: a cluster of thread blocks a row."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import as_rows
from .._shared.quantized import CODES, NARROW, fits_vectors, new_quantized
from .._shared.registry import Provider
from ..linear._cuda import check_capability
from .reference import quantize_rows as formula

MOST_COLUMNS = 1 << 16  # of a row that a cluster holds


def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """Build or load the kernel; the op's function on it."""
    check_capability("quantize_rows")
    kernel = CudaKernel("quantize_rows", "9q")  # struct QuantizeRowsArguments

    def quantize_rows(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x, stride = as_rows(x)
        rows, columns = x.shape
        if not fits_vectors(MOST_COLUMNS, x):
            return formula(x, group, dtype)
        values, scale = new_quantized(x, columns, group, dtype)
        pointers = x.data_ptr(), values.data_ptr(), scale.data_ptr()
        kernel(x.device, *pointers, rows, columns, stride, group, CODES[dtype], DTYPES[x.dtype])
        return values, scale

    return quantize_rows


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=NARROW)
