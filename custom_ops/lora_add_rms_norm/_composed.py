"""lamina::lora_add_rms_norm as the two ops that it stands for."""

from collections.abc import Sequence

from torch import Tensor

from ..add_rms_norm.op import add_rms_norm
from ..lora.op import lora


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
    """The op, as op.py states it."""
    return add_rms_norm(lora(y, x, a, b, scales, slots, rows), residual, weight, eps)
