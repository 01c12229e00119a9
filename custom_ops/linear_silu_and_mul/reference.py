"""The formula of lamina::linear_silu_and_mul."""

from torch import Tensor

from ..linear.reference import linear
from ..silu_and_mul.reference import silu_and_mul


def linear_silu_and_mul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False
) -> Tensor:
    """linear, then silu_and_mul."""
    return silu_and_mul(linear(x, weight, bias, batch_invariant))
