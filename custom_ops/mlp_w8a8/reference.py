"""The formula of lamina::mlp_w8a8."""

import torch
from torch import Tensor

from ..linear_w8a8.reference import linear_w8a8
from ..scaled_linear.reference import scaled_linear
from ..silu_and_mul.reference import silu_and_mul


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
    """scaled_linear, then silu_and_mul, then linear_w8a8."""
    both = scaled_linear(x, x_scale, gate_up, gate_up_scale, gate_up_bias, dtype)
    return linear_w8a8(silu_and_mul(both), down, down_scale, down_bias)
