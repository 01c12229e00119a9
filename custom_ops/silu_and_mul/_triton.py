"""The Triton kernel of lamina::silu_and_mul and lamina::gelu_and_mul."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.layout import as_rows, num_rows

BLOCK = 1024


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """x times the logistic function of twice its polynomial, which is half of one more than its tanh."""
    return x / (1.0 + tl.exp(-2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def act_and_mul_kernel(
    gate_up,  # [rows, 2 * intermediate], rows stride apart
    out,  # [rows, intermediate]
    stride,
    intermediate,
    chunks,  # programs of a row
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    columns = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < intermediate
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + intermediate + columns, mask=inside, other=0.0).to(tl.float32)
    active = gelu(gate) if GELU else silu(gate)
    active = active.to(dtype).to(tl.float32)  # rounded before it meets the other half
    tl.store(out + row * intermediate + columns, (active * up).to(dtype), mask=inside)


def act_and_mul(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    """The activation of one half times the other half."""
    intermediate = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], intermediate))
    gate_up, stride = as_rows(gate_up)
    chunks = triton.cdiv(intermediate, BLOCK)
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (num_rows(gate_up) * chunks,)
            act_and_mul_kernel[grid](gate_up, out, stride, intermediate, chunks, GELU=is_gelu, BLOCK=BLOCK)
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """The op, as op.py states it."""
    return act_and_mul(gate_up, is_gelu=False)
