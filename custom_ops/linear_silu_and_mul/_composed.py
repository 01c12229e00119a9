"""lamina::linear_silu_and_mul as the two ops that it stands for, each by its own provider."""

import torch
from torch import Tensor

from .._shared.registry import Provider

OPS = torch.ops.lamina


def linear_silu_and_mul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False
) -> Tensor:
    """The op, as op.py states it."""
    gated: Tensor = OPS.silu_and_mul.default(OPS.linear.default(x, weight, bias, batch_invariant))
    return gated


PROVIDER = Provider(name="composed", load=lambda: linear_silu_and_mul)
