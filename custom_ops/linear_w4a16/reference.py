"""The formula of lamina::linear_w4a16."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.precision import accumulation_dtype
from ..silu_and_mul import reference as gate
from .layout import numbers_of, unshuffle, unshuffle_groups


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
    """x @ dequantize(weight, scale, zero, group).T + bias, then silu_and_mul where it is asked for"""
    wide = accumulation_dtype(x.dtype)
    rows = dequantize(weight, scale, zero, group, shuffled=shuffled).to(wide)
    out = F.linear(x.to(wide), rows, None if bias is None else bias.to(wide)).to(x.dtype)
    return gate.silu_and_mul(out) if silu_and_mul else out


def dequantize(
    weight: Tensor, scale: Tensor, zero: Tensor | None, group: int, *, shuffled: bool = False
) -> Tensor:
    """The weights [out, in], of scale's dtype: number * scale + zero, rounded once."""
    if shuffled:
        weight, scale = unshuffle(weight), unshuffle_groups(scale)
        zero = None if zero is None else unshuffle_groups(zero)
    # float32 products are exact in float64 alone: rounded before zero is added they would be rounded twice
    wide = torch.float64 if scale.dtype == torch.float32 else accumulation_dtype(scale.dtype)
    whole = numbers_of(weight).to(wide)
    of_column = torch.arange(whole.shape[1], device=weight.device)
    of_column = of_column // (group if group > 0 else max(1, whole.shape[1]))
    rows = whole * scale.to(wide)[:, of_column]
    if zero is not None:
        rows += zero.to(wide)[:, of_column]
    return rows.to(scale.dtype)
