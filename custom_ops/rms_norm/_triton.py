"""The Triton kernel of the norms, alone or of a sum, by either kind of weight: a program a row, read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.layout import as_rows, num_rows


@triton.jit
def norm_kernel(
    x,  # [rows, hidden], rows x_stride apart
    residual,  # like x; only where ADD
    weight,  # [hidden]
    out,  # [rows, hidden]
    total,  # [rows, hidden]; only where ADD
    x_stride,
    residual_stride,
    hidden,
    eps,
    ADD: tl.constexpr,
    UNROUNDED: tl.constexpr,  # the sum meets the norm as it is
    ZERO_CENTRED: tl.constexpr,  # weights are kept less one
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    dtype = out.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * hidden + columns, values.to(dtype), mask=inside)
        if not UNROUNDED:
            values = values.to(dtype).to(tl.float32)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / hidden + eps)
    units = values * factor
    if ZERO_CENTRED:
        weights += 1.0
    else:
        units = units.to(dtype).to(tl.float32)  # rounded before it meets the weight
    tl.store(out + row * hidden + columns, (units * weights).to(dtype), mask=inside)


def launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    eps: float,
    *,
    unrounded: bool = False,
    zero_centred: bool = False,
) -> None:
    """Normalise x, or where total is not out the sum of x and residual."""
    x, x_stride = as_rows(x)
    residual, residual_stride = as_rows(residual)
    rows, hidden = num_rows(x), x.shape[-1]
    if rows == 0 or hidden == 0:
        return
    block = triton.next_power_of_2(hidden)
    with torch.cuda.device_of(x):
        norm_kernel[(rows,)](
            x,
            residual,
            weight.contiguous(),
            out,
            total,
            x_stride,
            residual_stride,
            hidden,
            eps,
            ADD=total is not out,
            UNROUNDED=unrounded,
            ZERO_CENTRED=zero_centred,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op, as op.py states it."""
    out = x.new_empty(x.shape)
    launch(x, x, weight, out, out, eps)
    return out
