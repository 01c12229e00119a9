"""lamina::scaled_linear in FP8 on a CPU: C++ for few rows, the library's GEMM on widened weights for more."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel
from .._shared.fp8 import FP8
from .._shared.quantized import GROUP
from .._shared.registry import Provider
from .reference import scaled_linear as formula

FEW = 8  # rows up to which widening each weight in registers is faster than a GEMM of widened blocks
BLOCK_WEIGHTS = 1 << 20  # that are widened at once: 4 MiB


@functools.cache
def find_kernel() -> CpuKernel:
    """Build or load the kernel, once."""
    return CpuKernel("scaled_linear", "11q")  # struct ScaledLinearArguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    find_kernel()
    return scaled_linear


def scaled_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The op, as op.py states it."""
    if dtype not in DTYPES:
        return formula(x, x_scale, weight, scale, bias, dtype)
    multiply = multiply_few if scale.dim() == 1 and x.shape[0] <= FEW else multiply_blocks
    return multiply(x, x_scale, weight, scale, bias, dtype)


def multiply_few(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The op by the C++ kernel, for weights with a scale a row."""
    num_tokens, (rows, columns) = x.shape[0], weight.shape
    out, wide = x.new_empty((num_tokens, rows), dtype=dtype), x.float().contiguous()
    bias, x_scale = None if bias is None else bias.contiguous(), x_scale.contiguous()
    find_kernel()(
        dtype,
        *(wide.data_ptr(), x_scale.data_ptr(), weight.data_ptr(), scale.data_ptr()),
        *(0 if bias is None else bias.data_ptr(), out.data_ptr()),
        *(num_tokens, rows, columns, False, torch.get_num_threads()),
    )
    return out


def multiply_blocks(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The op by the library's GEMM in float32, some rows of weights at a time."""
    rows, columns = weight.shape
    out, wide = x.new_empty((x.shape[0], rows), dtype=dtype), x.float()
    wide *= by_column(x_scale, columns)
    step = max(1, BLOCK_WEIGHTS // columns)
    for first in range(0, rows, step):
        block = slice(first, first + step)
        sums = F.linear(wide, widened(weight[block], scale[block] if scale.dim() == 2 else None))
        if scale.dim() == 1:
            sums *= scale[block]
        out[:, block] = sums if bias is None else sums.add_(bias[block])
    return out


def widened(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Rows of weights in float32, times the scales of their groups where those are given."""
    out = torch.empty(weight.shape)
    pointers = weight.data_ptr(), 0 if scale is None else scale.data_ptr()
    find_kernel()(
        torch.float32, 0, 0, *pointers, 0, out.data_ptr(), 0, *weight.shape, True, torch.get_num_threads()
    )
    return out


def by_column(scale: Tensor, columns: int) -> Tensor:
    """A scale for each column of a row, from those of its groups; or of all columns, [rows, 1]."""
    return scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(GROUP, dim=1)[:, :columns]


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset({FP8}))
