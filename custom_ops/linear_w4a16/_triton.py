"""The Triton kernels of lamina::linear_w4a16: one row of x by weights as they lie; more by a library's GEMM.

For more rows the weights are written out in x's dtype first, once a call.
"""

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ._triton_eight_bits import by_one_row, write_out
from .layout import bits_of, columns_of

LONGEST_STEP = 2048  # columns
TILES_AT_ONCE = 8
WRITTEN_AT_ONCE = 1024  # bytes of weights


@triton.jit
def values_of(bits, at, scale, zero, inside, ZERO: tl.constexpr):
    """(bits - 8) * scale + zero, rounded to scale's dtype, by those at an index."""
    scales = tl.load(scale + at, mask=inside, other=0.0)
    values = (bits.to(tl.float32) - 8.0) * scales.to(tl.float32)
    if ZERO:
        values += tl.load(zero + at, mask=inside, other=0.0).to(tl.float32)
    return values.to(scales.dtype)


@triton.jit
def linear_w4a16_kernel(
    x,  # [k]
    weight,  # [n, k / 2]
    scale,  # [n, groups]
    zero,  # the same; only where ZERO
    bias,  # [n]; only where BIAS
    out,  # [n]
    k,
    groups,
    group,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    half = k // 2
    sums = tl.zeros([STEP // 2], tl.float32)
    for start in range(0, half, STEP // 2):
        at = start + tl.arange(0, STEP // 2)
        inside = at < half
        bits = tl.load(weight + row * half + at, mask=inside, other=0, eviction_policy="evict_first")
        of_group = row * groups + 2 * at // group  # two columns of one byte are of one group
        even = values_of(bits & 15, of_group, scale, zero, inside, ZERO)
        odd = values_of(bits >> 4, of_group, scale, zero, inside, ZERO)
        sums += even.to(tl.float32) * tl.load(x + 2 * at, mask=inside, other=0.0).to(tl.float32)
        sums += odd.to(tl.float32) * tl.load(x + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(sums, axis=0)
    if BIAS:
        total += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty))


@triton.jit
def shuffled_kernel(
    x,  # [k]
    weight,  # [n, k / 2], as layout.py shuffles it
    scale,  # [n, groups], likewise
    zero,  # the same; only where ZERO
    bias,  # [n]; only where BIAS
    out,  # [n]
    k,
    groups,
    group,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    TILES: tl.constexpr,  # of 64 columns at once
):
    row_tile, warp = tl.program_id(0).to(tl.int64) // 4, tl.program_id(0).to(tl.int64) % 4
    of_row = tl.arange(0, 8)[:, None]  # of the lower four bits; that of the upper ones is 8 below
    byte = tl.arange(0, 64 * TILES)[None, :]
    within = byte // 4 % 4 * 16 + byte % 2 * 8 + byte // 16 % 4 * 2 + byte // 2 % 2  # column in a tile
    upper, lower = tl.zeros([8], tl.float32), tl.zeros([8], tl.float32)
    for start in range(0, k // 64, TILES):
        tile = start + byte // 64
        inside = (tile < k // 64) & (of_row >= 0)
        at = (row_tile * (k // 64) + tile) * 2048 + warp * 512 + of_row * 64 + byte % 64
        bits = tl.load(weight + at, mask=inside, other=0, eviction_policy="evict_first")
        column = tile * 64 + within
        of_group = (row_tile * groups + column // group) * 64 + warp * 16 + of_row * 2
        values = tl.load(x + column, mask=tile < k // 64, other=0.0).to(tl.float32)
        upper += tl.sum(
            values_of(bits & 15, of_group, scale, zero, inside, ZERO).to(tl.float32) * values, axis=1
        )
        lower += tl.sum(
            values_of(bits >> 4, of_group + 1, scale, zero, inside, ZERO).to(tl.float32) * values, axis=1
        )
    row = row_tile * 64 + warp * 16 + tl.arange(0, 8)
    if BIAS:
        upper += tl.load(bias + row).to(tl.float32)
        lower += tl.load(bias + row + 8).to(tl.float32)
    tl.store(out + row, upper.to(out.dtype.element_ty))
    tl.store(out + row + 8, lower.to(out.dtype.element_ty))


@triton.jit
def dequantize_kernel(
    weight,  # [n, k / 2]
    scale,  # [n, groups]
    zero,  # the same; only where ZERO
    out,  # [n, k]
    num_bytes,
    k,
    groups,
    group,
    ZERO: tl.constexpr,
    COUNT: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = at < num_bytes
    bits = tl.load(weight + at, mask=inside, other=0)
    row, column = at // (k // 2), at % (k // 2) * 2
    of_group = row * groups + column // group
    even = values_of(bits & 15, of_group, scale, zero, inside, ZERO)
    odd = values_of(bits >> 4, of_group, scale, zero, inside, ZERO)
    tl.store(out + row * k + column, even, mask=inside)
    tl.store(out + row * k + column + 1, odd, mask=inside)


@triton.jit
def unshuffle_kernel(
    weight,  # [n, k / 2], as layout.py shuffles it
    scale,  # [n, groups], likewise
    zero,  # the same; only where ZERO
    out,  # [n, k]
    num_bytes,
    k,
    groups,
    group,
    ZERO: tl.constexpr,
    COUNT: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = at < num_bytes
    bits = tl.load(weight + at, mask=inside, other=0)
    lane, warp = at // 16 % 32, at // 512 % 4  # each lane has 16 bytes of a tile, each step of 16 columns 4
    row_tile, column_tile = at // 2048 // (k // 64), at // 2048 % (k // 64)
    row = row_tile * 64 + warp * 16 + lane // 4  # of the lower four bits; that of the upper ones is 8 below
    column = column_tile * 64 + at // 4 % 4 * 16 + at % 2 * 8 + lane % 4 * 2 + at // 2 % 2
    of_group = (row_tile * groups + column // group) * 64 + warp * 16 + lane // 4 * 2
    upper = values_of(bits & 15, of_group, scale, zero, inside, ZERO)
    lower = values_of(bits >> 4, of_group + 1, scale, zero, inside, ZERO)
    tl.store(out + row * k + column, upper, mask=inside)
    tl.store(out + (row + 8) * k + column, lower, mask=inside)


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
    group = x.shape[1] if group < 0 else group
    if x.shape[0] == 1 and weight.numel() > 0:
        multiply = _one_row_of_shuffled if shuffled else _one_row
        if bits_of(weight) == 8:
            multiply = partial(by_one_row, shuffled=shuffled)
        out = multiply(x, weight, scale, zero, bias, group)
    else:
        out = F.linear(x, dequantize(weight, scale, zero, group, shuffled=shuffled), bias)
    return torch.ops.lamina.silu_and_mul.default(out) if silu_and_mul else out


def _one_row(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group: int
) -> Tensor:
    (n, groups), k = scale.shape, x.shape[1]
    x, out = x.contiguous(), x.new_empty((1, n))
    step = min(LONGEST_STEP, triton.next_power_of_2(k))
    flags = {"ZERO": zero is not None, "BIAS": bias is not None, "STEP": step}
    with torch.cuda.device_of(out):
        linear_w4a16_kernel[(n,)](
            *(x, weight, scale, zero, bias, out, k, groups, group),
            **flags,
            num_warps=max(1, step // 512),
        )
    return out


def _one_row_of_shuffled(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group: int
) -> Tensor:
    (n, groups), k = scale.shape, x.shape[1]
    x, out = x.contiguous(), x.new_empty((1, n))
    flags = {"ZERO": zero is not None, "BIAS": bias is not None, "TILES": TILES_AT_ONCE}
    with torch.cuda.device_of(out):
        shuffled_kernel[(n // 16,)](x, weight, scale, zero, bias, out, k, groups, group, **flags, num_warps=4)
    return out


def dequantize(
    weight: Tensor, scale: Tensor, zero: Tensor | None, group: int, *, shuffled: bool = False
) -> Tensor:
    """The weights [out, in], of scale's dtype."""
    (n, groups), k = scale.shape, columns_of(weight)
    out = scale.new_empty((n, k))
    if bits_of(weight) == 8:
        write_out(weight, scale, zero, out, group, shuffled=shuffled)
    elif out.numel() > 0:
        grid = (triton.cdiv(weight.numel(), WRITTEN_AT_ONCE),)
        kernel = unshuffle_kernel if shuffled else dequantize_kernel
        with torch.cuda.device_of(out):
            kernel[grid](
                *(weight, scale, zero, out, weight.numel(), k, groups, group),
                ZERO=zero is not None,
                COUNT=WRITTEN_AT_ONCE,
            )
    return out
