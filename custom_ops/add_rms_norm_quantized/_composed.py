"""lamina::add_rms_norm_quantized as two calls of the ops it stands for, each by its own provider."""

import torch
from torch import Tensor

from .._shared.registry import Provider

OPS = torch.ops.lamina


def add_rms_norm_quantized(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: int,
    dtype: torch.dtype,
    zero_centred: bool = False,
    unrounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op, as op.py states it."""
    norm = OPS.add_zero_centred_rms_norm if zero_centred else OPS.add_rms_norm
    normed, total = norm.default(x, residual, weight, eps, unrounded)
    return *OPS.quantize_rows.default(normed, group, dtype), total


PROVIDER = Provider(name="composed", load=lambda: add_rms_norm_quantized, devices=frozenset({"cuda"}))
