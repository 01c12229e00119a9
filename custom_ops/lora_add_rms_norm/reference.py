"""The formula of lamina::lora_add_rms_norm."""

from collections.abc import Sequence

from torch import Tensor

from ..add_rms_norm.reference import add_rms_norm
from ..lora.reference import lora


def lora_add_rms_norm(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
    residual: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """What adapters add to a projection, then its residual sum, normed, and that sum."""
    return add_rms_norm(lora(y, x, a, b, scales, slots, rows), residual, weight, eps)
