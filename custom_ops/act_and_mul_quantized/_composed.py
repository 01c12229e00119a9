"""lamina::act_and_mul_quantized as two calls of the ops it stands for, each by its own provider."""

import torch
from torch import Tensor

from .._shared.registry import Provider

OPS = torch.ops.lamina


def act_and_mul_quantized(
    gate_up: Tensor, gelu: bool, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The op, as op.py states it."""
    gate = OPS.gelu_and_mul if gelu else OPS.silu_and_mul
    result: tuple[Tensor, Tensor] = OPS.quantize_rows.default(gate.default(gate_up), group, dtype)
    return result


PROVIDER = Provider(name="composed", load=lambda: act_and_mul_quantized, devices=frozenset({"cuda"}))
