"""The C++ kernels of lamina::linear_w4a16."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel, by_rows
from .._shared.registry import Provider
from ..linear._cpu import CODES
from ..linear.choices import Method
from . import reference
from .layout import bits_of, unshuffle, unshuffle_groups


@functools.cache
def find_kernel() -> CpuKernel:
    """Build or load the kernel, once."""
    return CpuKernel("linear_w4a16", "13q")  # struct LinearW4A16Arguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    find_kernel()
    return linear_w4a16


def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int,
    shuffled: bool = False,
    silu_and_mul: bool = False,
) -> Tensor:
    """The op, as op.py states it."""
    if bits_of(weight) == 8:  # which is for GPUs
        return reference.linear_w4a16(x, weight, scale, zero, bias, group, shuffled, silu_and_mul)
    if shuffled:  # likewise
        weight, scale = unshuffle(weight), unshuffle_groups(scale)
        zero = None if zero is None else unshuffle_groups(zero)
    out = launch(x, weight, scale, zero, bias, group, method_of(x.dtype))
    return torch.ops.lamina.silu_and_mul.default(out) if silu_and_mul else out


def launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int,
    method: Method,
) -> Tensor:
    """The product with weights by rows, by a method that this CPU has."""
    x = by_rows(x)
    num_tokens, rows, columns = x.shape[0], weight.shape[0], x.shape[1]
    out = x.new_empty((num_tokens, rows))
    bias = None if bias is None else bias.contiguous()
    done = find_kernel()(
        x.dtype,
        *(x.data_ptr(), x.stride(0), weight.data_ptr(), scale.data_ptr()),
        *(0 if part is None else part.data_ptr() for part in (zero, bias)),
        *(out.data_ptr(), num_tokens, rows, columns, max(columns, 1) if group < 0 else group),
        *(CODES[method], torch.get_num_threads()),
    )
    assert done, f"{method} of {x.dtype}"
    return out


def method_of(dtype: torch.dtype) -> Method:
    """The method for many rows on this CPU."""
    return Method.AMX if dtype == torch.bfloat16 and has_amx() else Method.DOT


@functools.cache
def has_amx() -> bool:
    """Whether this CPU multiplies bfloat16 by AMX tiles."""
    return bool(find_kernel().library.linear_w4a16_has_amx())


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
