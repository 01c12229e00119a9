"""lamina::layer_norm, normalisation by mean and variance over the last dimension."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from ..rms_norm.op import check_norm
from . import reference


def layer_norm(
    x: Tensor,  # [num_tokens, hidden]
    weight: Tensor,  # [hidden]
    bias: Tensor | None,  # [hidden]
    eps: float,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias in float32, rounded once to x's dtype."""
    result: Tensor = torch.ops.lamina.layer_norm.default(x, weight, bias, eps)
    return result


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    check_norm("layer_norm", x, weight)
    if bias is not None and (bias.shape != weight.shape or bias.dtype != x.dtype):
        got = f"bias is {list(bias.shape)} {bias.dtype}"
        raise ShapeError(f"layer_norm: {got}; wanted the weight's {list(weight.shape)} {x.dtype}")


define_op(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(Provider(name="reference", load=lambda: reference.layer_norm),),
)
