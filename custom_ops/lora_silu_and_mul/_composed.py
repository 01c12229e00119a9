"""lamina::lora_silu_and_mul as the two ops that it stands for."""

from collections.abc import Sequence

from torch import Tensor

from ..lora.op import lora
from ..silu_and_mul.op import silu_and_mul


def lora_silu_and_mul(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
) -> Tensor:
    """The op, as op.py states it."""
    return silu_and_mul(lora(y, x, a, b, scales, slots, rows))
