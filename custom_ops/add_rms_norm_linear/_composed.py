"""lamina::add_rms_norm_linear as two or three calls of the ops it stands for, each by its own provider.

So GPUs are served: a norm made anew by every block of the GEMM was measured and lost, since a norm in a
launch of its own runs while the GEMM's weights are being loaded already.
"""

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
    """The op, as op.py states it."""
    normed, total = OPS.add_rms_norm.default(x, residual, norm_weight, eps)
    if silu_and_mul and scale is None:
        return OPS.linear_silu_and_mul.default(normed, weight, bias, batch_invariant), total
    if scale is None:
        out = OPS.linear.default(normed, weight, bias, batch_invariant)
    else:
        out = OPS.linear_int8.default(normed, weight, scale, bias)
    return OPS.silu_and_mul.default(out) if silu_and_mul else out, total


PROVIDER = Provider(name="composed", load=lambda: add_rms_norm_linear, devices=frozenset({"cuda"}))
