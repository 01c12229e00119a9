"""Fragments of projections in four bits: with a gate behind them, with others that read them, without."""

import torch
from torch import Tensor

from ..models.layers import FAST_OPS
from .fragments import State, Step, add_norm, apply_linear

EVERY_COLUMN = -1


def _multiply(state: State, x: Tensor, rows: int, *, zero: bool = False, biased: bool = False) -> Tensor:
    """A projection in four bits with one group of columns."""
    weight = state.weight(rows, x.shape[-1] // 2, dtype=torch.uint8)
    scale, zeros = state.weight(rows, 1), state.weight(rows, 1) if zero else None
    bias = state.weight(rows) if biased else None
    arguments = x, weight, scale, zeros, bias, EVERY_COLUMN
    result: Tensor = torch.ops.lamina.linear_w4a16.default(*arguments)
    return result


def mlp_w4a16(state: State, step: Step) -> None:
    state.gates += 1
    state.gates_w4a16 += 1
    gate_up = _multiply(state, state.x * 2, 2 * state.intermediate, zero=step.swapped)
    state.set(apply_linear(state, FAST_OPS.silu_and_mul(gate_up), state.hidden), "gemm")


def norm_mlp_w4a16(state: State, step: Step) -> None:
    add_norm(state, step)
    state.gates += 1
    state.gates_w4a16 += 1
    state.share()
    gate_up = _multiply(state, state.x, 2 * state.intermediate, biased=True)
    state.set(apply_linear(state, FAST_OPS.silu_and_mul(gate_up), state.hidden), "gemm")


def mlp_w4a16_with_projection_kept(state: State, step: Step) -> None:
    state.gates += 1
    gate_up = _multiply(state, state.x * 2, 2 * state.intermediate)
    state.extras.append(gate_up * 2)
    state.set(apply_linear(state, FAST_OPS.silu_and_mul(gate_up), state.hidden), "gemm")


def gelu_mlp_w4a16(state: State, step: Step) -> None:
    """A gate that the kernel does not have."""
    state.gelus += 1
    gate_up = _multiply(state, state.x * 2, 2 * state.intermediate)
    state.set(apply_linear(state, FAST_OPS.gelu_and_mul(gate_up), state.hidden), "gemm")


def linear_w4a16(state: State, step: Step) -> None:
    state.set(_multiply(state, state.x * 2, state.hidden), "gemm")


PLAIN = (mlp_w4a16,)
ODD = (norm_mlp_w4a16, mlp_w4a16_with_projection_kept, gelu_mlp_w4a16, linear_w4a16)
