"""Fragments of projections: GEMMs behind a norm of a sum, and what is no GEMM by a weight."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.layers import FAST_OPS
from .fragments import State, Step, add_norm, apply_gate_up, apply_linear, plant_linear


def _square(state: State) -> Tensor:
    return state.weight(state.hidden, state.hidden)


# A norm of a sum with GEMMs behind it.


def add_norm_linear(state: State, step: Step) -> None:
    add_norm(state, step)
    state.set(apply_linear(state, state.x, state.hidden), "gemm")


def add_norm_mlp(state: State, step: Step) -> None:
    add_norm(state, step)
    state.gates += 1
    gated = FAST_OPS.silu_and_mul(apply_gate_up(state))
    state.set(apply_linear(state, gated, state.hidden), "gemm")


def add_norm_biased_mlp(state: State, step: Step) -> None:
    add_norm(state, step)
    state.gates += 1
    gated = FAST_OPS.silu_and_mul(apply_gate_up(state, biased=True))
    state.set(apply_linear(state, gated, state.hidden), "gemm")


def add_norm_mlp_with_gemm_kept(state: State, step: Step) -> None:
    """The projection is read apart from its gate, so that the gate stays by itself."""
    add_norm(state, step)
    state.gates += 1
    gemm = apply_linear(state, state.x, 2 * state.intermediate)
    state.extras.append(gemm * 2)
    state.set(apply_linear(state, FAST_OPS.silu_and_mul(gemm), state.hidden), "gemm")


def add_norm_linear_with_norm_kept(state: State, step: Step) -> None:
    add_norm(state, step)
    state.share()
    state.extras.append(state.x * 2)
    state.set(apply_linear(state, state.x, state.hidden), "gemm")


def add_norm_read_by_two_linears(state: State, step: Step) -> None:
    add_norm(state, step)
    left, right = (apply_linear(state, state.x, state.hidden) for _ in range(2))
    state.set(right * left if step.swapped else left * right)


def add_norm_linear_with_late_bias(state: State, step: Step) -> None:
    """The bias is known only after the sum, in whose place the op would stand."""
    add_norm(state, step)
    state.share()
    bias = state.weight(state.hidden) * state.residual.mean(0, keepdim=True).view(-1)
    state.set(F.linear(plant_linear(state, state.x), _square(state), bias), "gemm")


def linear_of_the_sum(state: State, step: Step) -> None:
    """The GEMM takes the sum and not its norm, which goes on by itself."""
    add_norm(state, step)
    state.extras.append(apply_linear(state, state.residual, state.hidden))


# GEMMs that are no linears.


def gemm_of_untransposed(state: State, step: Step) -> None:
    state.set(state.x @ _square(state), "gemm")


def gemm_of_computed_weight(state: State, step: Step) -> None:
    state.set(F.linear(state.x, _square(state) * 2), "gemm")


def gemm_with_scaled_bias(state: State, step: Step) -> None:
    weight, bias = _square(state), state.weight(state.hidden)
    state.set(torch.addmm(bias, state.x, weight.t(), beta=0.5), "gemm")


def gemm_with_matrix_for_bias(state: State, step: Step) -> None:
    state.set(torch.addmm(state.residual, state.x, _square(state).t()), "gemm")


def gemm_of_columns(state: State, step: Step) -> None:
    """The first factor is laid out column by column."""
    columns = (_square(state) @ state.x.t()).t()
    state.set(F.linear(columns, _square(state)), "gemm")


PLAIN = (add_norm_linear, add_norm_mlp)
ODD = (
    *(add_norm_biased_mlp, add_norm_mlp_with_gemm_kept, add_norm_linear_with_norm_kept),
    *(add_norm_read_by_two_linears, add_norm_linear_with_late_bias, linear_of_the_sum),
    *(gemm_of_untransposed, gemm_of_computed_weight, gemm_with_scaled_bias),
    *(gemm_with_matrix_for_bias, gemm_of_columns),
)
