"""lamina::linear_lora as the two ops that it stands for, each by its own provider."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._shared.registry import Provider

OPS = torch.ops.lamina


def linear_lora(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
    batch_invariant: bool = False,
) -> Tensor:
    """The op, as op.py states it."""
    y = OPS.linear.default(x, weight, bias, batch_invariant)
    added: Tensor = OPS.lora.default(y, x, a, b, scales, slots, rows)
    return added


PROVIDER = Provider(name="composed", load=lambda: linear_lora)
