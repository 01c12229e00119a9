"""The CUDA kernel of lamina::act_and_mul_quantized: a cluster of thread blocks a row."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import as_rows
from .._shared.quantized import CODES, NARROW, fits_vectors, new_quantized
from .._shared.registry import Provider
from ..linear._cuda import check_capability
from ..quantize_rows._cuda import MOST_COLUMNS
from . import _composed


def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """Build or load the kernel; the op's function on it."""
    check_capability("act_and_mul_quantized")
    kernel = CudaKernel("act_and_mul_quantized", "10q")  # struct QuantizedGateArguments

    def act_and_mul_quantized(
        gate_up: Tensor, gelu: bool, group: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        gate_up, stride = as_rows(gate_up)
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        if columns % 8 or not fits_vectors(2 * MOST_COLUMNS, gate_up):
            return _composed.act_and_mul_quantized(gate_up, gelu, group, dtype)
        values, scale = new_quantized(gate_up, columns, group, dtype)
        pointers = gate_up.data_ptr(), values.data_ptr(), scale.data_ptr()
        kernel(
            gate_up.device, *pointers, rows, columns, stride, gelu, group, CODES[dtype], DTYPES[gate_up.dtype]
        )
        return values, scale

    return act_and_mul_quantized


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=NARROW)
