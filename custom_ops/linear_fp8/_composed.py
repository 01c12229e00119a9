"""lamina::linear_fp8 as the two ops it stands for, each by its own provider."""

import torch
from torch import Tensor

from .._shared.fp8 import group_of
from .._shared.registry import Provider

OPS = torch.ops.lamina


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The op, as op.py states it."""
    values, x_scale = OPS.quantize_fp8.default(x, group_of(scale))
    out: Tensor = OPS.scaled_linear_fp8.default(values, x_scale, weight, scale, bias, x.dtype)
    return out


PROVIDER = Provider(name="composed", load=lambda: linear_fp8)
