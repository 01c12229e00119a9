"""lamina::scaled_linear, a projection of quantized activations by weights in the same format."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.quantized import FORMATS, check_rows, check_weight, num_groups
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cpu, _cuda, reference


def scaled_linear(
    x: Tensor,  # [num_tokens, in_features] float8_e4m3fn or int8
    x_scale: Tensor,  # [num_tokens] float32; [num_tokens, in_features / 128] where scale has two dimensions
    weight: Tensor,  # [out_features, in_features] of x's dtype
    scale: Tensor,  # [out_features] or, in FP8, [out_features, in_features / 128] float32
    bias: Tensor | None,  # [out_features], of `dtype`
    dtype: torch.dtype,  # of the result
) -> Tensor:
    """(x * x_scale) @ (weight * scale).T + bias, [num_tokens, out_features].

    Products are summed in float32 (float64 for float64), of int8 exactly, times both scales, of groups within
    the sum; the result is rounded once.
    """
    result: Tensor = torch.ops.lamina.scaled_linear.default(x, x_scale, weight, scale, bias, dtype)
    return result


def _fake(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _check(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> None:
    check_rows("scaled_linear", "x", x)
    check_weight("scaled_linear", x.shape[1], weight, scale, bias)
    if x.dtype != weight.dtype or x_scale.dtype != torch.float32:
        got = f"x is {x.dtype}, x_scale {x_scale.dtype}"
        raise ShapeError(f"scaled_linear: {got}; wanted the weight's {weight.dtype} and {torch.float32}")
    wanted = [x.shape[0], *([num_groups(x.shape[1])] if scale.dim() == 2 else [])]
    if list(x_scale.shape) != wanted:
        raise ShapeError(f"scaled_linear: x_scale is {list(x_scale.shape)}; wanted {wanted}")
    if bias is not None and bias.dtype != dtype:
        raise ShapeError(f"scaled_linear: bias is {bias.dtype}; wanted the result's {dtype}")


define_op(
    "scaled_linear(Tensor x, Tensor x_scale, Tensor weight, Tensor scale, Tensor? bias, ScalarType dtype)"
    " -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("scaled_linear", dtypes=FORMATS),
        _cpu.PROVIDER,
        Provider(name="reference", load=lambda: reference.scaled_linear),
    ),
)
