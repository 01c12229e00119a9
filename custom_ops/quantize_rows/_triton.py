"""The Triton kernel of lamina::quantize_rows: a program a row, or a group of its columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.layout import as_rows
from .._shared.quantized import INT8, LARGEST, has_tensor_cores, new_quantized, num_groups
from .reference import TINY
from .reference import quantize_rows as formula


@triton.jit
def quantize_kernel(
    x,  # [rows, columns], rows stride apart
    out,  # [rows, columns]
    scale,  # [groups, rows]
    stride,
    rows,
    columns,
    groups,  # of a row
    width,  # columns of a group
    TINY: tl.constexpr,
    LARGEST: tl.constexpr,
    WHOLE: tl.constexpr,  # numbers
    BLOCK: tl.constexpr,
):
    row, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    offsets = tl.arange(0, BLOCK)
    at = group * width + offsets
    inside = (offsets < width) & (at < columns)
    values = tl.load(x + row.to(tl.int64) * stride + at, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(values), axis=0)
    broken = tl.sum((values != values).to(tl.int32), axis=0) > 0  # a maximum may pass over NaN
    peak = tl.where(broken, float("nan"), tl.maximum(peak, TINY))
    step = tl.div_rn(peak, LARGEST)
    tl.store(scale + group * rows + row, step)
    steps = tl.div_rn(values, step)
    limited = tl.minimum(tl.maximum(steps, -LARGEST), LARGEST)
    if WHOLE:
        limited = (limited + 12582912.0) - 12582912.0  # 1.5 * 2^23, of which neighbours are 1 apart
    steps = tl.where(steps != steps, 0.0 if WHOLE else steps, limited)
    tl.store(out + row.to(tl.int64) * columns + at, steps.to(out.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The op, as op.py states it."""
    if not has_tensor_cores(x.device, dtype):
        return formula(x, group, dtype)
    values, scale = new_quantized(x, x.shape[1], group, dtype)
    (rows, columns), width = x.shape, group or x.shape[1]
    groups = num_groups(columns) if group else 1
    x, stride = as_rows(x)
    block = triton.next_power_of_2(width)
    if rows:
        with torch.cuda.device_of(x):
            quantize_kernel[(rows * groups,)](
                *(x, values, scale, stride, rows, columns, groups, width),
                TINY=TINY,
                LARGEST=LARGEST[dtype],
                WHOLE=dtype == INT8,
                BLOCK=block,
                num_warps=min(16, max(1, block // 512)),
            )
    return values, scale
