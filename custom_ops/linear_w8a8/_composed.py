"""lamina::linear_w8a8 as the two ops it stands for, each by its own provider."""

import torch
from torch import Tensor

from .._shared.quantized import group_of
from .._shared.registry import Provider

OPS = torch.ops.lamina


def linear_w8a8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The op, as op.py states it."""
    values, x_scale = OPS.quantize_rows.default(x, group_of(scale), weight.dtype)
    out: Tensor = OPS.scaled_linear.default(values, x_scale, weight, scale, bias, x.dtype)
    return out


PROVIDER = Provider(name="composed", load=lambda: linear_w8a8)
