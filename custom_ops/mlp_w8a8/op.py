"""lamina::mlp_w8a8, an MLP whose projections have weights in one byte, of quantized activations."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.quantized import check_rows, check_weight, num_groups
from .._shared.registry import Provider
from . import _composed, _cuda, reference


def mlp_w8a8(
    x: Tensor,  # [num_tokens, in_features] float8_e4m3fn or int8
    x_scale: Tensor,  # [num_tokens] float32; [num_tokens, in_features / 128] where scales have two dimensions
    gate_up: Tensor,  # [2 * intermediate, in_features] of x's dtype, rows of the gate first
    gate_up_scale: Tensor,  # [2 * intermediate] or, in FP8, [2 * intermediate, in_features / 128] float32
    gate_up_bias: Tensor | None,  # [2 * intermediate], of `dtype`
    down: Tensor,  # [out_features, intermediate] of x's dtype
    down_scale: Tensor,  # [out_features] or [out_features, intermediate / 128] float32, like gate_up_scale
    down_bias: Tensor | None,  # [out_features], of `dtype`
    dtype: torch.dtype,  # of the result
) -> Tensor:
    """linear_w8a8 of silu_and_mul of scaled_linear, [num_tokens, out_features].

    Gate and up are scaled_linear(x, x_scale, gate_up, gate_up_scale, gate_up_bias, dtype). Each op rounds as
    it would by itself.
    """
    result: Tensor = torch.ops.lamina.mlp_w8a8.default(
        *(x, x_scale, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias, dtype)
    )
    return result


def _fake(
    x: Tensor,
    x_scale: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((x.shape[0], down.shape[0]), dtype=dtype)


def _check(
    x: Tensor,
    x_scale: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    check_rows("mlp_w8a8", "x", x)
    check_weight("mlp_w8a8", x.shape[1], gate_up, gate_up_scale, gate_up_bias)
    if gate_up.shape[0] % 2:
        raise ShapeError(f"mlp_w8a8: gate_up is {list(gate_up.shape)}; wanted as many rows of both")
    check_weight("mlp_w8a8", gate_up.shape[0] // 2, down, down_scale, down_bias)
    if {x.dtype, down.dtype} != {gate_up.dtype} or x_scale.dtype != torch.float32:
        got = f"x is {x.dtype}, down {down.dtype}, x_scale {x_scale.dtype}"
        raise ShapeError(f"mlp_w8a8: {got}; wanted gate_up's {gate_up.dtype} twice and {torch.float32}")
    wanted = [x.shape[0], *([num_groups(x.shape[1])] if gate_up_scale.dim() == 2 else [])]
    if list(x_scale.shape) != wanted or gate_up_scale.dim() != down_scale.dim():
        got = f"x_scale is {list(x_scale.shape)}, down_scale of {down_scale.dim()} dimensions"
        raise ShapeError(f"mlp_w8a8: {got}; wanted {wanted} and {gate_up_scale.dim()}")
    for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if bias is not None and bias.dtype != dtype:
            raise ShapeError(f"mlp_w8a8: {name} is {bias.dtype}; wanted the result's {dtype}")


define_op(
    "mlp_w8a8(Tensor x, Tensor x_scale, Tensor gate_up, Tensor gate_up_scale, Tensor? gate_up_bias,"
    " Tensor down, Tensor down_scale, Tensor? down_bias, ScalarType dtype) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        _composed.PROVIDER,
        Provider(name="reference", load=lambda: reference.mlp_w8a8),
    ),
)
