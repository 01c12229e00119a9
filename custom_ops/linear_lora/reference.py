"""The formula of lamina::linear_lora."""

from collections.abc import Sequence

from torch import Tensor

from ..linear.reference import linear
from ..lora.reference import lora


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
    """linear, then lora."""
    return lora(linear(x, weight, bias, batch_invariant), x, a, b, scales, slots, rows)
