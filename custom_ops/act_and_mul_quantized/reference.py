"""The formula of lamina::act_and_mul_quantized."""

import torch
from torch import Tensor

from ..gelu_and_mul.reference import gelu_and_mul
from ..quantize_rows.reference import quantize_rows
from ..silu_and_mul.reference import silu_and_mul


def act_and_mul_quantized(
    gate_up: Tensor, gelu: bool, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """quantize_rows of silu_and_mul, or of gelu_and_mul."""
    return quantize_rows(gelu_and_mul(gate_up) if gelu else silu_and_mul(gate_up), group, dtype)
