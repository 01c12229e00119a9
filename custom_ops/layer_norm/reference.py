"""The formula of lamina::layer_norm."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias as torch has it, rounded once to x's dtype."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
