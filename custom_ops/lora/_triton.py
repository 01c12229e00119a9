"""The Triton kernels of lamina::lora: a program shrinks a part of a token, or expands some of its outputs."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 256  # that a program shrinks at a time
ROWS = 64  # outputs that a program expands


@triton.jit
def shrink_kernel(
    x,
    x_token,
    a,
    scales,
    slots,
    shrunk,
    num_columns,
    num_parts,
    rank,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    if tl.load(scales + slot * num_parts + part) == 0.0:
        return
    places = tl.arange(0, RANK)
    own = a + ((slot * num_parts + part) * rank + places[:, None]) * num_columns
    sums = tl.zeros((RANK, COLUMNS), tl.float32)
    for first in range(0, num_columns, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        given = tl.load(x + token * x_token + columns, mask=columns < num_columns, other=0.0)
        inside = (places[:, None] < rank) & (columns[None, :] < num_columns)
        sums += (
            tl.load(own + columns[None, :], mask=inside, other=0.0).to(tl.float32)
            * given.to(tl.float32)[None, :]
        )
    target = shrunk + (token * num_parts + part) * rank + places
    tl.store(target, tl.sum(sums, axis=1), mask=places < rank)


@triton.jit
def expand_kernel(
    y,
    y_token,
    b,
    scales,
    slots,
    shrunk,
    out,
    num_rows,
    num_parts,
    part,
    offset,
    end,
    rank,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    rows = offset + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    places = tl.arange(0, RANK)
    given = tl.load(y + token * y_token + rows, mask=rows < end, other=0.0)
    target = out + token * num_rows + rows
    slot = tl.load(slots + token).to(tl.int64)
    scale = 0.0
    if slot >= 0:
        scale = tl.load(scales + slot * num_parts + part).to(tl.float32)
    if scale != 0.0:
        own = b + (slot * num_rows + rows[:, None]) * rank + places[None, :]
        inside = (rows[:, None] < end) & (places[None, :] < rank)
        values = tl.load(shrunk + (token * num_parts + part) * rank + places, mask=places < rank, other=0.0)
        sums = tl.sum(tl.load(own, mask=inside, other=0.0).to(tl.float32) * values[None, :], axis=1)
        given = (given.to(tl.float32) + scale * sums).to(given.dtype)
    tl.store(target, given, mask=rows < end)


def lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
) -> Tensor:
    """The op, as op.py states it: a launch that shrinks, and one a part that expands."""
    out, num_parts, rank = y.new_empty(y.shape), len(rows), b.shape[2]
    if not out.numel():
        return out
    y, x = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (y, x))
    shrunk = y.new_empty((len(y), num_parts, rank), dtype=torch.float32)
    blocks = {"RANK": triton.next_power_of_2(rank), "num_warps": 4}
    with torch.cuda.device_of(y):
        shrink_kernel[(len(y), num_parts)](
            *(x, x.stride(0), a, scales, slots, shrunk, x.shape[1], num_parts, rank),
            COLUMNS=COLUMNS,
            **blocks,
        )
        offset = 0
        for part, count in enumerate(rows):
            expand_kernel[(len(y), triton.cdiv(count, ROWS))](
                *(y, y.stride(0), b, scales, slots, shrunk, out, y.shape[1], num_parts),
                *(part, offset, offset + count, rank),
                ROWS=ROWS,
                **blocks,
            )
            offset += count
    return out
