"""The Triton kernel of lamina::scaled_linear; the formula where tensor cores know no FP8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.quantized import GROUP, has_tensor_cores
from .reference import scaled_linear as formula


@triton.jit
def scaled_linear_kernel(
    x,  # [tokens, k]
    x_scale,  # [tokens], or [tokens, k / STEP], token_stride and group_stride apart
    weight,  # [n, k]
    scale,  # [n] or [n, k / STEP]
    bias,  # [n]; only where BIAS
    out,  # [tokens, n]
    tokens,
    n,
    k,
    token_stride,
    group_stride,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    TOKENS: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,  # of the weights, of a tile
    STEP: tl.constexpr,  # columns at once, after which sums are added up in float32
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = rows < n, token < tokens
    weights = weight + rows.to(tl.int64)[None, :] * k
    values = x + token.to(tl.int64)[:, None] * k
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    groups = tl.cdiv(k, STEP)
    for group in range(groups):
        columns = group * STEP + tl.arange(0, STEP)
        inside = columns < k
        left = tl.load(values + columns[None, :], mask=is_token[:, None] & inside[None, :], other=0.0)
        right = tl.load(weights + columns[:, None], mask=is_row[None, :] & inside[:, None], other=0.0)
        part = tl.dot(left, right).to(tl.float32)
        if GROUPED:
            of_x = tl.load(x_scale + token * token_stride + group * group_stride, mask=is_token, other=0.0)
            of_weight = tl.load(scale + rows.to(tl.int64) * groups + group, mask=is_row, other=0.0)
            part *= of_x[:, None] * of_weight[None, :]
        sums += part
    if not GROUPED:
        sums *= tl.load(x_scale + token * token_stride, mask=is_token, other=0.0)[:, None]
        sums *= tl.load(scale + rows, mask=is_row, other=0.0)[None, :]
    if BIAS:
        sums += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    places = out + token.to(tl.int64)[:, None] * n + rows[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


def scaled_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The op, as op.py states it."""
    if not has_tensor_cores(x.device, x.dtype):
        return formula(x, x_scale, weight, scale, bias, dtype)
    (num_tokens, k), n = x.shape, weight.shape[0]
    x, out = x.contiguous(), x.new_empty((num_tokens, n), dtype=dtype)
    is_grouped = scale.dim() == 2
    tile = min(64, max(16, triton.next_power_of_2(num_tokens)))
    if out.numel():
        with torch.cuda.device_of(x):
            scaled_linear_kernel[(triton.cdiv(n, 64), triton.cdiv(num_tokens, tile))](
                *(x, x_scale, weight, scale, bias, out, num_tokens, n, k),
                *(x_scale.stride(0), x_scale.stride(1) if is_grouped else 0),
                BIAS=bias is not None,
                GROUPED=is_grouped,
                TOKENS=tile,
                ROWS=64,
                STEP=GROUP,
                num_warps=4,
                num_stages=4,
            )
    return out
