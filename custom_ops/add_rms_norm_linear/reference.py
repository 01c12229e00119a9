"""The formula of lamina::add_rms_norm_linear."""

from torch import Tensor

from ..add_rms_norm.reference import add_rms_norm
from ..linear.reference import linear
from ..linear_int8.reference import linear_int8
from ..silu_and_mul import reference as gate


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
    """add_rms_norm, then linear or, with a scale, linear_int8, then silu_and_mul where it is asked for."""
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    out = (
        linear(normed, weight, bias, batch_invariant)
        if scale is None
        else linear_int8(normed, weight, scale, bias)
    )
    return gate.silu_and_mul(out) if silu_and_mul else out, total
