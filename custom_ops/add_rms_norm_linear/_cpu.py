"""The C++ kernel of lamina::add_rms_norm_linear: norm, GEMM and gate in one parallel section."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cpu_kernel import DEVICES, DTYPES, CpuKernel, by_rows
from .._shared.registry import Provider
from ..linear._cpu import CODES, method_of, one_method
from ..linear.choices import Method
from ..linear_int8._cpu import method_of as method_of_bytes
from . import _composed


@functools.cache
def find_kernel() -> CpuKernel:
    """Build or load the kernel, once."""
    return CpuKernel("add_rms_norm_linear", "17qd")  # struct AddRmsNormLinearArguments


def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """Build or load the kernel; the op's function on it."""
    find_kernel()
    return add_rms_norm_linear


def add_rms_norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    silu_and_mul: bool,
    scale: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """The op, as op.py states it."""
    method: Method | None
    if batch_invariant and scale is None:
        method, weight = one_method(x.dtype), weight if weight.stride(1) == 1 else weight.contiguous()
    elif scale is None:
        method = method_of("gated" if silu_and_mul else "linear", x, weight)
    else:
        method = method_of_bytes(x.dtype, x.shape[0])
    arguments = x, residual, norm_weight, eps, weight, bias, silu_and_mul
    if method is None:
        return _composed.add_rms_norm_linear(*arguments, scale)
    return launch(*arguments, method, scale)


def launch(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    silu_and_mul: bool,
    method: Method,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The op by a method that this CPU has, with weights whose rows are contiguous."""
    num_tokens, (rows, columns) = x.shape[0], weight.shape
    x, residual, norm_weight = (by_rows(tensor) for tensor in (x, residual, norm_weight))
    bias = None if bias is None else bias.contiguous()
    out, total = x.new_empty((num_tokens, rows // 2 if silu_and_mul else rows)), x.new_empty(x.shape)
    done = find_kernel()(
        x.dtype,
        *(x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), norm_weight.data_ptr()),
        *(weight.data_ptr(), weight.stride(0), 0 if scale is None else scale.data_ptr()),
        *(0 if bias is None else bias.data_ptr(),),
        *(out.data_ptr(), total.data_ptr(), num_tokens, rows, columns),
        *(silu_and_mul, CODES[method], torch.get_num_threads(), eps),
    )
    assert done, f"{method} of {x.dtype}"
    return out, total


PROVIDER = Provider(name="cpu", load=load, devices=DEVICES, dtypes=frozenset(DTYPES))
