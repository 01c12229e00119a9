"""lamina::linear_int8, a projection with int8 weights and one scale for each row (output channel)."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from . import _cpu, reference


def linear_int8(
    x: Tensor,  # [num_tokens, in_features]
    weight: Tensor,  # [out_features, in_features] int8, -127 to 127
    scale: Tensor,  # [out_features] float32
    bias: Tensor | None = None,  # [out_features], of x's dtype
) -> Tensor:
    """x @ (weight * scale).T + bias, [num_tokens, out_features], of x's dtype.

    Multiply-adds are in float32 (float64 for float64), and the result is rounded once.
    """
    result: Tensor = torch.ops.lamina.linear_int8.default(x, weight, scale, bias)
    return result


def _fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        got = f"x is {list(x.shape)}, weight {list(weight.shape)}"
        raise ShapeError(f"linear_int8: {got}; wanted [T, in] and [out, in]")
    if weight.dtype != torch.int8 or scale.dtype != torch.float32:
        got = f"weight is {weight.dtype}, scale {scale.dtype}"
        raise ShapeError(f"linear_int8: {got}; wanted torch.int8 and torch.float32")
    if scale.shape != weight.shape[:1] or (bias is not None and bias.shape != weight.shape[:1]):
        got = f"scale is {list(scale.shape)}, bias {None if bias is None else list(bias.shape)}"
        raise ShapeError(f"linear_int8: {got}; wanted [{weight.shape[0]}]")
    if bias is not None and bias.dtype != x.dtype:
        raise ShapeError(f"linear_int8: bias is {bias.dtype}; wanted x's {x.dtype}")
    if not weight.is_contiguous() or not scale.is_contiguous():
        raise ShapeError("linear_int8: wanted a contiguous weight and a contiguous scale")


define_op(
    "linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(_cpu.PROVIDER, Provider(name="reference", load=lambda: reference.linear_int8)),
)
