"""Fragments that programs are made of: sites a pass must find, and look-alikes it must leave alone."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_ops._shared.precision import accumulation_dtype
from ..models.layers import FAST_OPS

NARROW = (torch.bfloat16, torch.float16)
CONVERT = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True, kw_only=True)
class Step:
    """One fragment of a program and the choices it leaves open."""

    kind: str
    eps: float
    swapped: bool = False  # operands of multiplications and sums the other way round
    squared: bool = False  # x * x where the formula has a power


@dataclass(kw_only=True)
class State:
    """What the fragments hand on, x and a residual, both [T, hidden]; and the sites planted so far."""

    x: Tensor
    residual: Tensor
    weight: Callable[..., Tensor]  # weight(*shape, dtype=...) -> a fresh input of the program
    dtype: torch.dtype
    hidden: int
    intermediate: int
    # Of x: "gemm", "sum" of two alike, "sum_norm" of such, "bfloat16" once, or "other".
    origin: str = "other"
    readers: int = 0  # of x, where it is a norm of a sum: GEMMs that are linears, and others
    extras: list[Tensor] = field(default_factory=list)
    barriers: int = 0
    sum_norms: int = 0
    norms: int = 0  # with and without a sum
    fused_norms: int = 0  # that are none without their sum, which is not rounded before
    head_norms: int = 0  # pairs of norms of one tensor's heads
    gates: int = 0
    gelus: int = 0
    linears: int = 0
    fused: int = 0  # linears that alone read the norm of a sum
    linear_gates: int = 0  # gates that alone read a linear
    fused_gates: int = 0  # of these, behind a linear that is fused
    is_gated: bool = False  # what reads x
    norms_quantized: int = 0  # norms that projections in one byte alone read
    gates_quantized: int = 0
    mlps_w8a8: int = 0  # of gates that are quantized, between projections in one format of what a norm made
    gates_w4a16: int = 0  # behind projections in four bits that nobody else reads

    @property
    def is_narrow(self) -> bool:
        return self.dtype in NARROW

    @property
    def other_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float32 else torch.float32

    def plant_norm(self) -> str:
        """A norm of x, and what that makes it; of a sum it is a site of the op that adds as well."""
        self.norms += 1
        self.sum_norms += self.origin == "sum"
        return "sum_norm" if self.origin == "sum" else "other"

    def set(self, x: Tensor, origin: str = "other") -> None:
        is_fused = self.origin == "sum_norm" and self.readers == 1
        self.fused += is_fused
        self.fused_gates += is_fused and self.is_gated
        self.x, self.origin, self.readers, self.is_gated = x, origin, 0, False

    def share(self) -> None:
        """Something other than the next fragment reads x too."""
        self.readers += 2


# Formulas written out, with one thing to vary each.


def _unit(
    step: Step,
    x: Tensor,
    *,
    mean: Callable[[Tensor], Tensor] = lambda square: square.mean(-1, keepdim=True),
    scale: Callable[[Tensor, float], Tensor] = lambda mean, eps: torch.rsqrt(mean + eps),
    inner: torch.dtype | None = None,
    unit_of: Tensor | None = None,
) -> Tensor:
    """x over its root mean square, rounded to x's dtype."""
    wide = x.to(inner or accumulation_dtype(x.dtype))
    factor = scale(mean(wide * wide if step.squared else wide.pow(2)), step.eps)
    source = wide if unit_of is None else unit_of.to(wide.dtype)
    return (factor * source if step.swapped else source * factor).to(x.dtype)


def _weigh(state: State, step: Step, unit: Tensor, weight: Tensor | None = None) -> Tensor:
    weight = state.weight(state.hidden) if weight is None else weight
    return weight * unit if step.swapped else unit * weight


def _norm(state: State, step: Step, x: Tensor) -> Tensor:
    return _weigh(state, step, _unit(step, x))


def _sum(step: Step, left: Tensor, right: Tensor) -> Tensor:
    return right + left if step.swapped else left + right


def plant_linear(state: State, x: Tensor) -> Tensor:
    """x, of which the GEMM that follows is a linear where x lies row by row."""
    in_rows = isinstance(x.stride(-1), int) and x.stride(-1) == 1
    state.linears += in_rows or x.shape[-1] == 1
    state.readers += x is state.x
    return x


def apply_linear(state: State, x: Tensor, rows: int) -> Tensor:
    return FAST_OPS.linear(plant_linear(state, x), state.weight(rows, x.shape[-1]))


def apply_gate_up(state: State, *, is_gate: bool = True, biased: bool = False) -> Tensor:
    """x by the rows of gate and up; is_gate: a gate that passes know reads them, and nothing else does."""
    linears, rows = state.linears, 2 * state.intermediate
    weight, bias = state.weight(rows, state.hidden), state.weight(rows) if biased else None
    both = FAST_OPS.linear(plant_linear(state, state.x), weight, bias)
    if is_gate:
        state.is_gated = True
        state.linear_gates += state.linears - linears
    return both


def by_columns(state: State, rows: int) -> Tensor:
    """A GEMM's result laid out column by column, as no model of ours makes it but a graph may hold it."""
    state.share()
    return (state.weight(rows, state.hidden) @ state.x.t()).t()


# GEMMs and sums.


def linear(state: State, step: Step) -> None:
    state.set(apply_linear(state, state.x, state.hidden), "gemm")


def biased_linear(state: State, step: Step) -> None:
    weight, bias = state.weight(state.hidden, state.hidden), state.weight(state.hidden)
    state.set(F.linear(plant_linear(state, state.x), weight, bias), "gemm")


def add(state: State, step: Step) -> None:
    state.barriers += state.is_narrow and state.origin == "gemm"
    state.set(_sum(step, state.x, state.residual), "sum")


def add_viewed_gemm(state: State, step: Step) -> None:
    heads = apply_linear(state, state.x, state.hidden).view(-1, 2, state.hidden // 2)
    total = _sum(step, heads, state.residual.view(-1, 2, state.hidden // 2))
    state.barriers += state.is_narrow
    state.set(total.view(-1, state.hidden))


def add_scaled(state: State, step: Step) -> None:
    state.set(torch.add(state.x, state.residual, alpha=0.5))


def add_bias(state: State, step: Step) -> None:
    state.set(_sum(step, state.x, state.weight(state.hidden)))


def add_in_other_dtype(state: State, step: Step) -> None:
    """One operand is widened and the other promoted, which no pass takes for a sum of two alike."""
    total = _sum(step, state.x, state.residual.to(state.other_dtype))
    state.set(total.to(state.dtype))


# Norms as they are.


def norm(state: State, step: Step) -> None:
    origin = state.plant_norm()
    state.set(FAST_OPS.rms_norm(state.x, state.weight(state.hidden), step.eps), origin)


def written_norm(state: State, step: Step) -> None:
    origin = state.plant_norm()
    state.set(_norm(state, step, state.x), origin)


def add_norm(state: State, step: Step) -> None:
    pair = (state.residual, state.x) if step.swapped else (state.x, state.residual)
    x, state.residual = FAST_OPS.add_rms_norm(*pair, state.weight(state.hidden), step.eps)
    state.norms += 1
    state.sum_norms += 1
    state.set(x, "sum_norm")


def norm_of_kept_sum(state: State, step: Step) -> None:
    """The sum is read by its norm, by a later residual and by the caller."""
    add(state, step)
    state.residual = state.x
    state.extras.append(state.x * 2)
    written_norm(state, step)


def two_norms_of_one_sum(state: State, step: Step) -> None:
    """The first takes the sum; the second is a norm of the sum that comes out of it."""
    add(state, step)
    state.plant_norm()
    state.extras.append(_norm(state, step, state.x))
    state.norms += 1
    state.set(_norm(state, step, state.x))


def norm_of_view(state: State, step: Step) -> None:
    origin = state.plant_norm()
    state.set(_norm(state, step, state.x.view(-1, state.hidden)), origin)


def norm_of_slice(state: State, step: Step) -> None:
    state.norms += 1
    state.set(_norm(state, step, apply_linear(state, state.x, 2 * state.hidden)[:, state.hidden :]))


def norm_with_unit_read_twice(state: State, step: Step) -> None:
    state.plant_norm()
    unit = _unit(step, state.x)
    state.set(_sum(step, unit, _weigh(state, step, unit)), "sum")


# Norms that are not what they seem, in all dtypes or in some.


def norm_with_late_weight(state: State, step: Step) -> None:
    """The weight is known only after the sum, in whose place the op would stand."""
    add(state, step)
    state.norms += 1
    weight = state.weight(state.hidden) * state.x.mean(0, keepdim=True).view(-1)
    state.set(_weigh(state, step, _unit(step, state.x), weight))


def norm_with_weight_in_other_dtype(state: State, step: Step) -> None:
    weight = state.weight(state.hidden, dtype=state.other_dtype)
    state.set(_weigh(state, step, _unit(step, state.x), weight).to(state.dtype))


def norm_rounded_to_other_dtype(state: State, step: Step) -> None:
    """All is of one dtype from where it is rounded on, and x is of another, unless it was of that once."""
    state.norms += state.origin == "bfloat16"
    narrow = torch.float16 if state.dtype == torch.bfloat16 else torch.bfloat16
    unit = _unit(step, state.x.to(accumulation_dtype(state.dtype))).to(narrow)
    weight = state.weight(state.hidden, dtype=narrow)
    state.set(
        _weigh(state, step, unit, weight).to(state.dtype),
        "bfloat16" if state.dtype == torch.float32 else "other",
    )


def norm_with_weight_before_cast(state: State, step: Step) -> None:
    """For narrow floats a norm that is all in float32, and as such a site."""
    state.sum_norms += not state.is_narrow and state.origin == "sum"
    state.norms += 1
    origin = "other" if state.is_narrow or state.origin != "sum" else "sum_norm"
    wide = accumulation_dtype(state.dtype)
    weight = state.weight(state.hidden).to(wide)
    state.set(_weigh(state, step, _unit(step, state.x.to(wide)), weight).to(state.dtype), origin)


def norm_in_float32(state: State, step: Step) -> None:
    origin = "other" if state.dtype == torch.float64 else state.plant_norm()
    state.set(_weigh(state, step, _unit(step, state.x, inner=torch.float32)), origin)


def norm_in_own_dtype(state: State, step: Step) -> None:
    origin = "other" if state.is_narrow else state.plant_norm()
    state.set(_weigh(state, step, _unit(step, state.x, inner=state.dtype)), origin)


def norm_by_columns(state: State, step: Step) -> None:
    """The result is laid out as no op of ours lays it out."""
    state.extras.append(_norm(state, step, by_columns(state, state.hidden)))
    linear(state, step)


def add_norm_by_columns(state: State, step: Step) -> None:
    left, right = (by_columns(state, state.hidden) for _ in range(2))
    state.extras += FAST_OPS.add_rms_norm(left, right, state.weight(state.hidden), step.eps)
    linear(state, step)


def norm_with_eps_outside(state: State, step: Step) -> None:
    unit = _unit(step, state.x, scale=lambda mean, eps: torch.rsqrt(mean) + eps)
    state.set(_weigh(state, step, unit))


def norm_with_eps_twice(state: State, step: Step) -> None:
    unit = _unit(step, state.x, scale=lambda mean, eps: torch.rsqrt(mean + eps + eps))
    state.set(_weigh(state, step, unit))


def norm_without_eps(state: State, step: Step) -> None:
    state.set(_weigh(state, step, _unit(step, state.x, scale=lambda mean, eps: torch.rsqrt(mean))))


def norm_by_sum(state: State, step: Step) -> None:
    unit = _unit(step, state.x, mean=lambda square: square.sum(-1, keepdim=True))
    state.set(_weigh(state, step, unit))


def norm_over_tokens(state: State, step: Step) -> None:
    unit = _unit(step, state.x, mean=lambda square: square.mean(0, keepdim=True))
    state.set(_weigh(state, step, unit))


def norm_over_all(state: State, step: Step) -> None:
    unit = _unit(step, state.x, mean=lambda square: square.mean((0, 1), keepdim=True))
    state.set(_weigh(state, step, unit))


def norm_without_keepdim(state: State, step: Step) -> None:
    unit = _unit(step, state.x, mean=lambda square: square.mean(-1).unsqueeze(-1))
    state.set(_weigh(state, step, unit))


def norm_scaling_another(state: State, step: Step) -> None:
    state.set(_weigh(state, step, _unit(step, state.x, unit_of=state.residual)))


# What canonicalise is for, and what it must not touch.


def repeated_calls(state: State, step: Step) -> None:
    weight = state.weight(state.hidden)
    left, right = (state.x * weight + state.residual for _ in range(2))
    state.set(_sum(step, left * 3, right), "sum")


def idle_calls(state: State, step: Step) -> None:
    torch.tanh(state.x)  # nobody reads it
    state.x = CONVERT(state.x.view(-1, state.hidden), state.dtype)


def equal_outputs(state: State, step: Step) -> None:
    """Equal results with a buffer each: a caller may write into one of them."""
    state.share()
    state.extras += [state.x * 2, state.x * 2, torch.zeros_like(state.x), torch.zeros_like(state.x)]


def output_of_idle_call(state: State, step: Step) -> None:
    state.share()
    state.extras += [CONVERT(state.residual, state.dtype), (state.x * 2).view(-1, state.hidden)]


PLAIN = (linear, biased_linear, add, norm, written_norm, add_norm, norm_of_kept_sum)
ODD = (
    *(add_viewed_gemm, add_scaled, add_bias, add_in_other_dtype, two_norms_of_one_sum),
    *(norm_of_view, norm_of_slice, norm_with_unit_read_twice, norm_with_late_weight),
    *(
        norm_rounded_to_other_dtype,
        norm_with_weight_in_other_dtype,
        norm_with_weight_before_cast,
        norm_in_float32,
        norm_in_own_dtype,
    ),
    *(norm_by_columns, add_norm_by_columns, norm_with_eps_outside, norm_with_eps_twice, norm_without_eps),
    *(norm_by_sum, norm_over_tokens, norm_over_all, norm_without_keepdim, norm_scaling_another),
    *(repeated_calls, idle_calls, equal_outputs, output_of_idle_call),
)
