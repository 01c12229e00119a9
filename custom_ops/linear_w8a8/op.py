"""lamina::linear_w8a8, a projection with weights in one byte, whose format it quantizes activations to."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.quantized import check_rows, check_weight
from .._shared.registry import Provider
from . import _composed, _cuda, reference


def linear_w8a8(
    x: Tensor,  # [num_tokens, in_features]
    weight: Tensor,  # [out_features, in_features] float8_e4m3fn or int8
    scale: Tensor,  # [out_features], or in FP8 [out_features, in_features / 128] rounded up, float32
    bias: Tensor | None = None,  # [out_features], of x's dtype
) -> Tensor:
    """q @ weight.T, times the scales of both, plus bias, [num_tokens, out_features], of x's dtype.

    (q, s) is quantize_rows(x) in that format: a scale a row of x, or a group of 128 columns where the weights
    have one. Products are summed in float32, of int8 exactly, times s and scale (within the sum where those
    are a group's), and the result is rounded once.
    """
    result: Tensor = torch.ops.lamina.linear_w8a8.default(x, weight, scale, bias)
    return result


def _fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
    check_rows("linear_w8a8", "x", x)
    check_weight("linear_w8a8", x.shape[1], weight, scale, bias)
    if bias is not None and bias.dtype != x.dtype:
        raise ShapeError(f"linear_w8a8: bias is {bias.dtype}; wanted x's {x.dtype}")


define_op(
    "linear_w8a8(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        _composed.PROVIDER,
        Provider(name="reference", load=lambda: reference.linear_w8a8),
    ),
)
