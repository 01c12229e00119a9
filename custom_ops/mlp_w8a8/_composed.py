"""lamina::mlp_w8a8 as the ops it stands for, each by its own provider."""

import torch
from torch import Tensor

from .._shared.quantized import group_of
from .._shared.registry import Provider

OPS = torch.ops.lamina


def mlp_w8a8(
    x: Tensor,
    x_scale: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The op, as op.py states it."""
    both = OPS.scaled_linear.default(x, x_scale, gate_up, gate_up_scale, gate_up_bias, dtype)
    gated = OPS.act_and_mul_quantized.default(both, False, group_of(down_scale), down.dtype)
    out: Tensor = OPS.scaled_linear.default(*gated, down, down_scale, down_bias, dtype)
    return out


PROVIDER = Provider(name="composed", load=lambda: mlp_w8a8)
