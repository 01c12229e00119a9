"""The C++ kernels of lamina::linear_int8."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel, by_rows
from .._shared.registry import Provider
from ..linear._cpu import CODES
from ..linear.choices import Method

FEW = 2  # rows up to which dot products, which widen each weight in registers, are as fast as AMX


@functools.cache
def find_kernel() -> CpuKernel:
    """Build or load the kernel, once."""
    return CpuKernel("linear_int8", "11q")  # struct LinearInt8Arguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    find_kernel()
    return linear_int8


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The op, as op.py states it."""
    return launch(x, weight, scale, bias, method_of(x.dtype, x.shape[0]))


def launch(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, method: Method) -> Tensor:
    """The op by a method that this CPU has."""
    x = by_rows(x)
    num_tokens, (rows, columns) = x.shape[0], weight.shape
    out = x.new_empty((num_tokens, rows))
    bias = None if bias is None else bias.contiguous()
    done = find_kernel()(
        x.dtype,
        *(x.data_ptr(), x.stride(0), weight.data_ptr(), scale.data_ptr()),
        *(0 if bias is None else bias.data_ptr(), out.data_ptr()),
        *(num_tokens, rows, columns, CODES[method], torch.get_num_threads()),
    )
    assert done, f"{method} of {x.dtype}"
    return out


def method_of(dtype: torch.dtype, num_tokens: int) -> Method:
    """The method for so many rows on this CPU."""
    many = num_tokens > FEW and dtype == torch.bfloat16 and has_amx()
    return Method.AMX if many else Method.DOT


@functools.cache
def has_amx() -> bool:
    """Whether this CPU multiplies int8 weights, widened to bfloat16, by AMX tiles."""
    return bool(find_kernel().library.linear_int8_has_amx())


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
