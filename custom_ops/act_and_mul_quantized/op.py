"""lamina::act_and_mul_quantized, the gated activation of the MLP, quantized to FP8 in the same step."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.fp8 import check_group, check_rows, new_quantized
from .._shared.library import define_op
from .._shared.registry import Provider
from . import _composed, _cuda, reference


def act_and_mul_quantized(
    gate_up: Tensor,  # [num_tokens, 2 * intermediate]
    gelu: bool,  # gelu_and_mul, else silu_and_mul
    group: int,  # columns that share a scale: 128; 0: all of a row
) -> tuple[Tensor, Tensor]:
    """quantize_rows(a, group) with a = silu_and_mul(gate_up) or gelu_and_mul(gate_up), rounded as that is."""
    result: tuple[Tensor, Tensor] = torch.ops.lamina.act_and_mul_quantized.default(gate_up, gelu, group)
    return result


def _fake(gate_up: Tensor, gelu: bool, group: int) -> tuple[Tensor, Tensor]:
    return new_quantized(gate_up, gate_up.shape[1] // 2, group)


def _check(gate_up: Tensor, gelu: bool, group: int) -> None:
    check_rows("act_and_mul_quantized", "gate_up", gate_up)
    check_group("act_and_mul_quantized", group)
    if gate_up.shape[1] % 2:
        raise ShapeError(
            f"act_and_mul_quantized: gate_up is {list(gate_up.shape)}; wanted an even last dimension"
        )


define_op(
    "act_and_mul_quantized(Tensor gate_up, bool gelu, int group) -> (Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        _composed.PROVIDER,
        Provider(name="reference", load=lambda: reference.act_and_mul_quantized),
    ),
)
