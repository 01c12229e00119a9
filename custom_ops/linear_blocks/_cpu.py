"""The C++ kernel of lamina::linear_blocks."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel, by_rows
from .._shared.registry import Provider
from .layout import GROUP, KINDS


@functools.cache
def find_kernel() -> CpuKernel:
    """Build or load the kernel, once."""
    return CpuKernel("linear_blocks", "11q")  # struct LinearBlocksArguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    find_kernel()
    return linear_blocks


def linear_blocks(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, silu_and_mul: bool = False
) -> Tensor:
    """The op, as op.py states it."""
    if silu_and_mul and weight.shape[0] % (2 * GROUP):  # the rows that are gated begin amid a group
        gated: Tensor = torch.ops.lamina.silu_and_mul.default(linear_blocks(x, weight, bias, kind))
        return gated
    x = by_rows(x)
    num_tokens, columns, rows = *x.shape, weight.shape[0]
    out = x.new_empty((num_tokens, rows // 2 if silu_and_mul else rows))
    bias = None if bias is None else bias.contiguous()
    find_kernel()(
        x.dtype,
        *(x.data_ptr(), x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(out.data_ptr(), num_tokens, rows, columns, KINDS[kind].code, silu_and_mul),
        torch.get_num_threads(),
    )
    return out


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
