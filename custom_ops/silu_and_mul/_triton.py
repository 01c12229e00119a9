"""The Triton kernel of lamina::silu_and_mul."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import as_rows, num_rows

BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(
    gate_up,  # [rows, 2 * intermediate], rows stride apart
    out,  # [rows, intermediate]
    stride,
    intermediate,
    chunks,  # programs of a row
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    columns = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < intermediate
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + intermediate + columns, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # rounded before it meets the other half
    tl.store(out + row * intermediate + columns, (silu * up).to(dtype), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """The op's signature."""
    intermediate = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], intermediate))
    gate_up, stride = as_rows(gate_up)
    chunks = triton.cdiv(intermediate, BLOCK)
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (num_rows(gate_up) * chunks,)
            silu_and_mul_kernel[grid](gate_up, out, stride, intermediate, chunks, BLOCK=BLOCK)
    return out
