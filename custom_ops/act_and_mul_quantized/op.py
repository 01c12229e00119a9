"""lamina::act_and_mul_quantized, the gated activation of the MLP, quantized in the same step."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.quantized import check_format, check_rows, new_quantized
from .._shared.registry import Provider
from . import _composed, _cuda, reference


def act_and_mul_quantized(
    gate_up: Tensor,  # [num_tokens, 2 * intermediate]
    gelu: bool,  # gelu_and_mul, else silu_and_mul
    group: int,  # columns that share a scale: 128, in FP8 alone; 0: all of a row
    dtype: torch.dtype,  # of q: float8_e4m3fn or int8
) -> tuple[Tensor, Tensor]:
    """quantize_rows(a, group, dtype) with a rounded: silu_and_mul(gate_up), or gelu_and_mul(gate_up)."""
    result: tuple[Tensor, Tensor] = torch.ops.lamina.act_and_mul_quantized.default(
        gate_up, gelu, group, dtype
    )
    return result


def _fake(gate_up: Tensor, gelu: bool, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return new_quantized(gate_up, gate_up.shape[1] // 2, group, dtype)


def _check(gate_up: Tensor, gelu: bool, group: int, dtype: torch.dtype) -> None:
    check_rows("act_and_mul_quantized", "gate_up", gate_up)
    check_format("act_and_mul_quantized", group, dtype)
    if gate_up.shape[1] % 2:
        raise ShapeError(
            f"act_and_mul_quantized: gate_up is {list(gate_up.shape)}; wanted an even last dimension"
        )


define_op(
    "act_and_mul_quantized(Tensor gate_up, bool gelu, int group, ScalarType dtype) -> (Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        _composed.PROVIDER,
        Provider(name="reference", load=lambda: reference.act_and_mul_quantized),
    ),
)
