"""The formula of lamina::scaled_linear."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.precision import accumulation_dtype
from .._shared.quantized import GROUP, INT8


def scaled_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The sum over k of x[t, k] * weight[n, k], times x_scale and scale (of k's group), plus bias."""
    wide = accumulation_dtype(dtype)
    values, weights, x_scale, scale = (part.to(wide) for part in (x, weight, x_scale, scale))
    if x.dtype == INT8:
        out = F.linear(x.double(), weight.double()).to(wide) * x_scale[:, None] * scale
    elif scale.dim() == 1:
        out = F.linear(values, weights) * x_scale[:, None] * scale
    else:
        out = values.new_zeros((x.shape[0], weight.shape[0]))
        for group in range(scale.shape[1]):
            columns = slice(group * GROUP, (group + 1) * GROUP)
            sums = F.linear(values[:, columns], weights[:, columns])
            out += sums * x_scale[:, group, None] * scale[:, group]
    return (out if bias is None else out + bias.to(wide)).to(dtype)
