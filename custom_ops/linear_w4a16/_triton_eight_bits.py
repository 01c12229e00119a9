"""What the Triton provider of lamina::linear_w4a16 has for weights of eight bits, by rows or shuffled."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, TILE = 8, 32  # of weights that a program multiplies, and twice that of shuffled ones; columns of a tile
STEP = 256  # columns at once
WRITTEN_AT_ONCE = 1024  # weights


@triton.jit
def values_of(numbers, at, scale, zero, inside, ZERO: tl.constexpr):
    """numbers * scale + zero, rounded to scale's dtype, by those at an index."""
    scales = tl.load(scale + at, mask=inside, other=0.0)
    values = numbers.to(tl.float32) * scales.to(tl.float32)
    if ZERO:
        values += tl.load(zero + at, mask=inside, other=0.0).to(tl.float32)
    return values.to(scales.dtype)


@triton.jit
def place_of(row, column, k, SHUFFLED: tl.constexpr):
    """Where a weight lies: by rows, or as layout.py shuffles it."""
    if not SHUFFLED:
        return row * k + column
    tile = (row // 64 * (k // 32) + column // 32) * 2048 + row // 16 % 4 * 512
    lane = row % 8 * 64 + column // 2 % 4 * 16
    return tile + lane + column // 16 % 2 * 8 + column // 8 % 2 * 4 + column % 2 * 2 + row // 8 % 2


@triton.jit
def group_of(row, column, groups, group, SHUFFLED: tl.constexpr):
    """Where the scale of a weight lies."""
    if not SHUFFLED:
        return row * groups + column // group
    return (row // 64 * groups + column // group) * 64 + row // 16 % 4 * 16 + row % 8 * 2 + row // 8 % 2


@triton.jit
def one_row_kernel(
    x,  # [k]
    weight,  # [n, k] int8
    scale,  # [n, groups]
    zero,  # the same; only where ZERO
    bias,  # [n]; only where BIAS
    out,  # [n]
    n,
    k,
    groups,
    group,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    SHUFFLED: tl.constexpr,
    ROWS: tl.constexpr,  # of shuffled weights 16, which are those of a warp of the tensor cores
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros([ROWS], tl.float32)
    for start in range(0, k, STEP):
        column = start + tl.arange(0, STEP)
        inside = (row < n)[:, None] & (column < k)[None, :]
        at = place_of(row[:, None], column[None, :], k, SHUFFLED)
        numbers = tl.load(weight + at, mask=inside, other=0, eviction_policy="evict_first")
        scale_at = group_of(row[:, None], column[None, :], groups, group, SHUFFLED)
        values = values_of(numbers, scale_at, scale, zero, inside, ZERO).to(tl.float32)
        sums += tl.sum(
            values * tl.load(x + column, mask=column < k, other=0.0).to(tl.float32)[None, :], axis=1
        )
    if BIAS:
        sums += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(out + row, sums.to(out.dtype.element_ty), mask=row < n)


@triton.jit
def write_out_kernel(
    weight,  # [n, k] int8
    scale,  # [n, groups]
    zero,  # the same; only where ZERO
    out,  # [n, k]
    n,
    k,
    groups,
    group,
    ZERO: tl.constexpr,
    SHUFFLED: tl.constexpr,
    COUNT: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    row, column = at // k, at % k
    inside = row < n
    numbers = tl.load(weight + place_of(row, column, k, SHUFFLED), mask=inside, other=0)
    scale_at = group_of(row, column, groups, group, SHUFFLED)
    tl.store(out + at, values_of(numbers, scale_at, scale, zero, inside, ZERO), mask=inside)


def by_one_row(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int,
    *,
    shuffled: bool,
) -> Tensor:
    """The product of one row of x by weights as they lie, [1, n]."""
    (n, k), rows = weight.shape, 2 * ROWS if shuffled else ROWS
    x, out = x.contiguous(), x.new_empty((1, n))
    with torch.cuda.device_of(out):
        one_row_kernel[(triton.cdiv(n, rows),)](
            *(x, weight, scale, zero, bias, out, n, k, scale.shape[1], group),
            ZERO=zero is not None,
            BIAS=bias is not None,
            SHUFFLED=shuffled,
            ROWS=rows,
            STEP=STEP,
        )
    return out


def write_out(
    weight: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, group: int, *, shuffled: bool
) -> None:
    """The weights [n, k], of scale's dtype, into `out`."""
    (n, k), groups = weight.shape, scale.shape[1]
    if weight.numel() == 0:
        return
    with torch.cuda.device_of(out):
        write_out_kernel[(triton.cdiv(n * k, WRITTEN_AT_ONCE),)](
            *(weight, scale, zero, out, n, k, groups, group),
            ZERO=zero is not None,
            SHUFFLED=shuffled,
            COUNT=WRITTEN_AT_ONCE,
        )
