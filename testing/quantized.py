"""Fragments of projections in one byte: behind norms and gates that may quantize what they make, or not."""

import torch
from torch import Tensor

from ..custom_ops._shared.fp8 import FP8
from ..custom_ops._shared.quantized import INT8
from ..models.layers import FAST_OPS
from .fragments import State, Step, add_norm
from .zero_centred import add_norm_unrounded


def _multiply(
    state: State, x: Tensor, rows: int, *, grouped: bool = False, biased: bool = False, whole: bool = False
) -> Tensor:
    """A projection in FP8, or in whole numbers; of groups there is one, since rows here are short."""
    weight = state.weight(rows, x.shape[-1], dtype=INT8 if whole else FP8)
    scale = state.weight(*((rows, 1) if grouped else (rows,)), dtype=torch.float32)
    bias = state.weight(rows) if biased else None
    result: Tensor = torch.ops.lamina.linear_w8a8.default(x, weight, scale, bias)
    return result


def _down(state: State, x: Tensor, **options: bool) -> None:
    state.set(_multiply(state, x, state.hidden, **options))


# Projections behind a norm.


def norm_linear_w8a8(state: State, step: Step) -> None:
    state.plant_norm()
    state.norms_quantized += 1
    normed = FAST_OPS.rms_norm(state.x, state.weight(state.hidden), step.eps)
    _down(state, normed, biased=step.swapped, whole=step.squared)


def zero_norm_linear_w8a8(state: State, step: Step) -> None:
    state.plant_norm()
    state.norms_quantized += 1
    _down(state, FAST_OPS.zero_centred_rms_norm(state.x, state.weight(state.hidden), step.eps), grouped=True)


def add_norm_linear_w8a8(state: State, step: Step) -> None:
    add_norm(state, step)
    state.norms_quantized += 1
    _down(state, state.x, grouped=step.swapped)


def unrounded_norm_linear_w8a8(state: State, step: Step) -> None:
    add_norm_unrounded(state, step)
    state.norms_quantized += 1
    _down(state, state.x)


def norm_read_by_two_linears_w8a8(state: State, step: Step) -> None:
    """One quantization for both."""
    add_norm(state, step)
    state.norms_quantized += 1
    left, right = (_multiply(state, state.x, state.hidden) for _ in range(2))
    state.set(right * left if step.swapped else left * right)


def norm_linear_w8a8_with_norm_kept(state: State, step: Step) -> None:
    add_norm(state, step)
    state.share()
    state.extras.append(state.x * 2)
    _down(state, state.x)


def norm_read_in_two_formats(state: State, step: Step) -> None:
    """No one quantization serves both."""
    add_norm(state, step)
    left = _multiply(state, state.x, state.hidden, whole=step.swapped)
    state.set(left * _multiply(state, state.x, state.hidden, grouped=not step.swapped))


def linear_w8a8_of_the_sum(state: State, step: Step) -> None:
    """It takes the sum and not its norm, which goes on by itself."""
    add_norm(state, step)
    state.extras.append(_multiply(state, state.residual, state.hidden))


# Projections behind a gate, and behind neither.


def mlp_w8a8(state: State, step: Step) -> None:
    state.gates += 1
    state.gates_quantized += 1
    gate_up = _multiply(state, state.x * 2, 2 * state.intermediate)
    _down(state, FAST_OPS.silu_and_mul(gate_up), grouped=step.swapped)


def gelu_mlp_w8a8(state: State, step: Step) -> None:
    state.gelus += 1
    state.gates_quantized += 1
    gate_up = _multiply(state, state.x * 2, 2 * state.intermediate, grouped=True)
    _down(state, FAST_OPS.gelu_and_mul(gate_up), biased=True, whole=step.squared)


def mlp_w8a8_with_gate_kept(state: State, step: Step) -> None:
    state.gates += 1
    gated = FAST_OPS.silu_and_mul(_multiply(state, state.x * 2, 2 * state.intermediate))
    state.extras.append(gated * 2)
    _down(state, gated)


# Projections in front of a gate and behind it, of what a norm made.


def _gate_up(state: State, step: Step, **options: bool) -> Tensor:
    add_norm(state, step)
    state.norms_quantized += 1
    return _multiply(state, state.x, 2 * state.intermediate, **options)


def norm_mlp_w8a8(state: State, step: Step) -> None:
    gate_up = _gate_up(state, step, grouped=step.swapped, biased=step.squared)
    state.gates += 1
    state.gates_quantized += 1
    state.mlps_w8a8 += 1
    _down(state, FAST_OPS.silu_and_mul(gate_up), grouped=step.swapped, biased=not step.squared)


def norm_mlp_w8a8_in_int8(state: State, step: Step) -> None:
    gate_up = _gate_up(state, step, whole=True)
    state.gates += 1
    state.gates_quantized += 1
    state.mlps_w8a8 += 1
    _down(state, FAST_OPS.silu_and_mul(gate_up), whole=True)


def norm_mlp_w8a8_in_two_formats(state: State, step: Step) -> None:
    gate_up = _gate_up(state, step, whole=step.swapped)
    state.gates += 1
    state.gates_quantized += 1
    _down(state, FAST_OPS.silu_and_mul(gate_up), grouped=not step.swapped)


def norm_mlp_w8a8_with_gelu(state: State, step: Step) -> None:
    gate_up = _gate_up(state, step)
    state.gelus += 1
    state.gates_quantized += 1
    _down(state, FAST_OPS.gelu_and_mul(gate_up))


def norm_mlp_w8a8_with_projection_kept(state: State, step: Step) -> None:
    gate_up = _gate_up(state, step)
    state.gates += 1
    state.gates_quantized += 1
    state.extras.append(gate_up * 2)
    _down(state, FAST_OPS.silu_and_mul(gate_up))


def norm_mlp_w8a8_with_two_behind(state: State, step: Step) -> None:
    gated = FAST_OPS.silu_and_mul(_gate_up(state, step))
    state.gates += 1
    state.gates_quantized += 1
    state.extras.append(_multiply(state, gated, state.hidden))
    _down(state, gated)


def linear_w8a8(state: State, step: Step) -> None:
    """Of what neither a norm nor a gate has made."""
    _down(state, state.x * 2)


PLAIN = (norm_linear_w8a8, add_norm_linear_w8a8, mlp_w8a8, norm_mlp_w8a8)
ODD = (
    *(zero_norm_linear_w8a8, unrounded_norm_linear_w8a8, norm_read_by_two_linears_w8a8),
    *(norm_linear_w8a8_with_norm_kept, norm_read_in_two_formats, linear_w8a8_of_the_sum),
    *(gelu_mlp_w8a8, mlp_w8a8_with_gate_kept, linear_w8a8),
    *(norm_mlp_w8a8_in_int8, norm_mlp_w8a8_in_two_formats, norm_mlp_w8a8_with_gelu),
    *(norm_mlp_w8a8_with_projection_kept, norm_mlp_w8a8_with_two_behind),
)
