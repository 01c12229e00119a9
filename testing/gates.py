"""Fragments of gated MLPs: SiLU or GELU of one half times the other, and what only looks like it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_ops._shared.precision import accumulation_dtype
from ..models.layers import FAST_OPS
from .fragments import State, Step, apply_gate_up, apply_linear, by_columns


def _down(state: State, gated: Tensor) -> None:
    state.set(apply_linear(state, gated, state.hidden), "gemm")


def _multiply(step: Step, gate: Tensor, up: Tensor) -> Tensor:
    return up * gate if step.swapped else gate * up


def _halves(state: State, *, is_gate: bool = False) -> tuple[Tensor, Tensor]:
    gate, up = apply_gate_up(state, is_gate=is_gate).chunk(2, dim=-1)
    return gate, up


def mlp(state: State, step: Step) -> None:
    state.gates += 1
    _down(state, FAST_OPS.silu_and_mul(apply_gate_up(state)))


def written_mlp(state: State, step: Step) -> None:
    state.gates += 1
    gate, up = _halves(state, is_gate=True)
    _down(state, _multiply(step, F.silu(gate), up))


def mlp_of_split_sizes(state: State, step: Step) -> None:
    state.gates += 1
    gate, up = torch.split(apply_gate_up(state), [state.intermediate] * 2, dim=1)
    _down(state, _multiply(step, F.silu(gate), up))


def mlp_with_gate_read_twice(state: State, step: Step) -> None:
    state.gates += 1
    gate, up = _halves(state)
    activated = F.silu(gate)
    state.extras += [activated * 2, gate * 2]
    _down(state, _multiply(step, activated, up))


def mlp_in_float32(state: State, step: Step) -> None:
    is_gate = state.dtype != torch.float64
    state.gates += is_gate
    gate, up = _halves(state, is_gate=is_gate)
    _down(state, _multiply(step, F.silu(gate.float()).to(state.dtype), up))


def mlp_in_own_dtype(state: State, step: Step) -> None:
    """The formula for wide dtypes; narrow ones round at every step."""
    state.gates += not state.is_narrow
    gate, up = _halves(state, is_gate=not state.is_narrow)
    _down(state, _multiply(step, gate / (1 + torch.exp(-gate)), up))


def mlp_rounded_once(state: State, step: Step) -> None:
    state.gates += not state.is_narrow
    halves = _halves(state, is_gate=not state.is_narrow)
    gate, up = (half.to(accumulation_dtype(state.dtype)) for half in halves)
    _down(state, _multiply(step, F.silu(gate), up).to(state.dtype))


def mlp_of_swapped_halves(state: State, step: Step) -> None:
    up, gate = _halves(state)
    _down(state, _multiply(step, F.silu(gate), up))


def mlp_of_one_half(state: State, step: Step) -> None:
    gate, _ = _halves(state)
    _down(state, _multiply(step, F.silu(gate), gate))


def mlp_of_thirds(state: State, step: Step) -> None:
    gate, up, _ = apply_linear(state, state.x, 3 * state.intermediate).chunk(3, dim=-1)
    _down(state, _multiply(step, F.silu(gate), up))


def mlp_of_uneven_parts(state: State, step: Step) -> None:
    size = state.intermediate
    gate, up, _ = torch.split(apply_linear(state, state.x, 2 * size + 1), [size, size, 1], dim=-1)
    _down(state, _multiply(step, F.silu(gate), up))


def mlp_of_two_gemms(state: State, step: Step) -> None:
    (gate, _), (_, up) = _halves(state), _halves(state)
    _down(state, _multiply(step, F.silu(gate), up))


def mlp_of_slices(state: State, step: Step) -> None:
    """The same values, in a spelling that no pass knows."""
    whole = apply_linear(state, state.x, 2 * state.intermediate)
    _down(state, _multiply(step, F.silu(whole[:, : state.intermediate]), whole[:, state.intermediate :]))


def mlp_split_over_tokens(state: State, step: Step) -> None:
    columns = apply_linear(state, state.x, 2 * state.intermediate).t()
    gate, up = columns.chunk(2, dim=0)
    _down(state, _multiply(step, F.silu(gate), up).t())


def mlp_by_columns(state: State, step: Step) -> None:
    state.gates += state.intermediate == 1  # a single column lies row by row
    gate, up = by_columns(state, 2 * state.intermediate).chunk(2, dim=-1)
    gated = _multiply(step, F.silu(gate), up)
    state.extras.append(gated)
    _down(state, gated)


def mlp_with_gelu(state: State, step: Step) -> None:
    gate, up = _halves(state)
    _down(state, _multiply(step, F.gelu(gate), up))


def mlp_with_scaled_gate(state: State, step: Step) -> None:
    gate, up = _halves(state)
    _down(state, _multiply(step, F.silu(gate * 2), up))


def mlp_with_up_in_other_dtype(state: State, step: Step) -> None:
    gate, up = _halves(state)
    _down(state, _multiply(step, F.silu(gate), up.to(state.other_dtype)).to(state.dtype))


def _gelu(gate: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh")


def gelu_mlp(state: State, step: Step) -> None:
    state.gelus += 1
    _down(state, FAST_OPS.gelu_and_mul(apply_linear(state, state.x, 2 * state.intermediate)))


def written_gelu_mlp(state: State, step: Step) -> None:
    state.gelus += 1
    gate, up = _halves(state)
    _down(state, _multiply(step, _gelu(gate), up))


def gelu_mlp_with_gate_read_twice(state: State, step: Step) -> None:
    state.gelus += 1
    gate, up = _halves(state)
    activated = _gelu(gate)
    state.extras += [activated * 2, gate * 2]
    _down(state, _multiply(step, activated, up))


def gelu_mlp_in_float32(state: State, step: Step) -> None:
    state.gelus += state.dtype != torch.float64
    gate, up = _halves(state)
    _down(state, _multiply(step, _gelu(gate.float()).to(state.dtype), up))


def gelu_mlp_rounded_once(state: State, step: Step) -> None:
    state.gelus += not state.is_narrow
    gate, up = (half.to(accumulation_dtype(state.dtype)) for half in _halves(state))
    _down(state, _multiply(step, _gelu(gate), up).to(state.dtype))


def gelu_mlp_of_swapped_halves(state: State, step: Step) -> None:
    up, gate = _halves(state)
    _down(state, _multiply(step, _gelu(gate), up))


def gelu_mlp_by_columns(state: State, step: Step) -> None:
    state.gelus += state.intermediate == 1
    gate, up = by_columns(state, 2 * state.intermediate).chunk(2, dim=-1)
    gated = _multiply(step, _gelu(gate), up)
    state.extras.append(gated)
    _down(state, gated)


def gelu_mlp_by_another_constant(state: State, step: Step) -> None:
    gate, up = _halves(state)
    wide = gate.to(accumulation_dtype(state.dtype))
    inner = (wide + wide * wide * wide * 0.04) * 0.7978845608028654
    _down(state, _multiply(step, (wide * 0.5 * (torch.tanh(inner) + 1)).to(state.dtype), up))


def gelu_mlp_with_up_in_other_dtype(state: State, step: Step) -> None:
    gate, up = _halves(state)
    _down(state, _multiply(step, _gelu(gate), up.to(state.other_dtype)).to(state.dtype))


PLAIN: tuple[Callable[[State, Step], None], ...] = (mlp, written_mlp, gelu_mlp, written_gelu_mlp)
ODD: tuple[Callable[[State, Step], None], ...] = (
    *(mlp_of_split_sizes, mlp_with_gate_read_twice, mlp_in_float32, mlp_in_own_dtype, mlp_rounded_once),
    *(mlp_of_swapped_halves, mlp_of_one_half, mlp_of_thirds, mlp_of_uneven_parts, mlp_of_two_gemms),
    *(mlp_of_slices, mlp_split_over_tokens, mlp_by_columns, mlp_with_gelu, mlp_with_scaled_gate),
    *(mlp_with_up_in_other_dtype, gelu_mlp_with_gate_read_twice, gelu_mlp_in_float32),
    *(gelu_mlp_rounded_once, gelu_mlp_of_swapped_halves, gelu_mlp_by_columns),
    *(gelu_mlp_by_another_constant, gelu_mlp_with_up_in_other_dtype),
)
