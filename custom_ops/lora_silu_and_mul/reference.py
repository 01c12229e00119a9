"""The formula of lamina::lora_silu_and_mul."""

from collections.abc import Sequence

from torch import Tensor

from ..lora.reference import lora
from ..silu_and_mul.reference import silu_and_mul


def lora_silu_and_mul(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
) -> Tensor:
    """What adapters add to gate and up, then silu(gate) * up."""
    return silu_and_mul(lora(y, x, a, b, scales, slots, rows))
