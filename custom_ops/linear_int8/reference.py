"""The formula of lamina::linear_int8."""

import torch.nn.functional as F
from torch import Tensor

from .._shared.precision import accumulation_dtype


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ (weight * scale).T + bias"""
    wide = accumulation_dtype(x.dtype)
    rows = weight.to(wide) * scale.to(wide)[:, None]
    return F.linear(x.to(wide), rows, None if bias is None else bias.to(wide)).to(x.dtype)
