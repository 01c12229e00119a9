"""lamina::rms_norm_quantized as two calls of the ops it stands for, each by its own provider."""

import torch
from torch import Tensor

from .._shared.registry import Provider

OPS = torch.ops.lamina


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, group: int, dtype: torch.dtype, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """The op, as op.py states it."""
    norm = OPS.zero_centred_rms_norm if zero_centred else OPS.rms_norm
    result: tuple[Tensor, Tensor] = OPS.quantize_rows.default(norm.default(x, weight, eps), group, dtype)
    return result


PROVIDER = Provider(name="composed", load=lambda: rms_norm_quantized, devices=frozenset({"cuda"}))
