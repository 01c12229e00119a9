"""The formula of lamina::gelu_and_mul."""

import torch.nn.functional as F
from torch import Tensor


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) by its tanh formula, rounded to the input's dtype, times up; the halves of the last dim."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
