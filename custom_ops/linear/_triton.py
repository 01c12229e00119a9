"""The Triton kernel of lamina::linear for one row of x; the library's GEMM for more."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...common.errors import UnsupportedError

LONGEST_STEP = 2048


@triton.jit
def linear_kernel(
    x,  # [k]
    weight,  # [n, k]
    bias,  # [n]; only where BIAS
    out,  # [n]
    k,
    BIAS: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([STEP], tl.float32)
    for start in range(0, k, STEP):
        columns = start + tl.arange(0, STEP)
        inside = columns < k
        # each weight is read once, so it need not stay in the cache
        weights = tl.load(weight + row * k + columns, mask=inside, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + columns, mask=inside, other=0.0)
        sums += weights.to(tl.float32) * values.to(tl.float32)
    total = tl.sum(sums, axis=0)
    if BIAS:
        total += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    """The op, as op.py states it."""
    if batch_invariant:
        raise UnsupportedError(
            "linear by triton: batch_invariant is True; its bits depend on the number of rows"
        )
    n, k = weight.shape
    if x.shape[0] != 1 or not weight.is_contiguous() or n == 0 or k == 0:
        return F.linear(x, weight, bias)
    x, out = x.contiguous(), x.new_empty((1, n))
    step = min(LONGEST_STEP, triton.next_power_of_2(k))
    with torch.cuda.device_of(out):
        grid, warps = (n,), max(1, step // 512)
        linear_kernel[grid](x, weight, bias, out, k, BIAS=bias is not None, STEP=step, num_warps=warps)
    return out
