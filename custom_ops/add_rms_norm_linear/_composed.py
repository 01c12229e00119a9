"""lamina::add_rms_norm_linear as two or three calls of the ops it stands for, each by its own provider."""

import torch
from torch import Tensor

from .._shared.registry import Provider

OPS = torch.ops.lamina


def add_rms_norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    silu_and_mul: bool,
    scale: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """The op, as op.py states it; the fastest where the GEMM outweighs reading the norm again."""
    normed, total = OPS.add_rms_norm.default(x, residual, norm_weight, eps)
    if scale is None:
        out = OPS.linear.default(normed, weight, bias, batch_invariant)
    else:
        out = OPS.linear_int8.default(normed, weight, scale, bias)
    return OPS.silu_and_mul.default(out) if silu_and_mul else out, total


PROVIDER = Provider(name="composed", load=lambda: add_rms_norm_linear, devices=frozenset({"cuda"}))
