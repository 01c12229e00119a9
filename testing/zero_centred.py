"""Fragments of norms by weights kept less one, of sums normed before they are rounded, and look-alikes."""

from collections.abc import Callable

from torch import Tensor

from ..custom_ops._shared.precision import accumulation_dtype
from ..models.layers import FAST_OPS
from .fragments import State, Step, _sum, _unit, add, by_columns, linear


def _times(step: Step, unit: Tensor, factor: Tensor) -> Tensor:
    return factor * unit if step.swapped else unit * factor


def _wide_unit(step: Step, x: Tensor) -> Tensor:
    """x, which is wide, over its root mean square, not rounded."""
    return _unit(step, x)


def _wide(state: State, x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(state.dtype))


def _norm(state: State, step: Step, wide: Tensor, weight: Tensor) -> Tensor:
    return _times(step, _wide_unit(step, wide), 1.0 + _wide(state, weight)).to(state.dtype)


def _wide_sum(state: State, step: Step) -> Tensor:
    """The sum as it is before it is rounded, as which it becomes the residual."""
    total = _sum(step, _wide(state, state.x), _wide(state, state.residual))
    state.residual = total.to(state.dtype)
    return total


def zero_norm(state: State, step: Step) -> None:
    state.plant_norm()
    state.set(FAST_OPS.zero_centred_rms_norm(state.x, state.weight(state.hidden), step.eps))


def written_zero_norm(state: State, step: Step) -> None:
    state.plant_norm()
    state.set(_norm(state, step, _wide(state, state.x), state.weight(state.hidden)))


def add_zero_norm(state: State, step: Step) -> None:
    pair = (state.residual, state.x) if step.swapped else (state.x, state.residual)
    x, state.residual = FAST_OPS.add_zero_centred_rms_norm(*pair, state.weight(state.hidden), step.eps)
    state.norms += 1
    state.sum_norms += 1
    state.set(x)


def add_norm_unrounded(state: State, step: Step) -> None:
    """Of narrow floats it is a norm only together with its sum."""
    total = _wide_sum(state, step)
    state.sum_norms += 1
    state.norms += not state.is_narrow
    state.fused_norms += state.is_narrow
    unit = _wide_unit(step, total).to(state.dtype)
    state.set(_times(step, unit, state.weight(state.hidden)), "other" if state.is_narrow else "sum_norm")


def add_zero_norm_unrounded(state: State, step: Step) -> None:
    """Without its sum it is still a norm, one that is all in float32."""
    weight = state.weight(state.hidden)
    total = _wide_sum(state, step)
    state.sum_norms += 1
    state.norms += 1
    state.set(_norm(state, step, total, weight))


def zero_norm_of_kept_sum(state: State, step: Step) -> None:
    add(state, step)
    state.residual = state.x
    state.extras.append(state.x * 2)
    written_zero_norm(state, step)


def zero_norm_of_unrounded_sum_kept(state: State, step: Step) -> None:
    """The sum is read as it is before it is rounded, too."""
    weight = state.weight(state.hidden)
    total = _wide_sum(state, step)
    state.sum_norms += 1
    state.norms += 1
    state.extras.append(total * 2)
    state.set(_norm(state, step, total, weight))


def zero_norm_of_heads(state: State, step: Step) -> None:
    state.norms += 1
    heads = state.x.view(-1, 2, state.hidden // 2)
    state.set(_norm(state, step, _wide(state, heads), state.weight(state.hidden // 2)).view(-1, state.hidden))


# What is not such a norm in all dtypes or in some, or another one.


def zero_norm_with_factor_rounded(state: State, step: Step) -> None:
    """1 + weight in the model's dtype loses what a small weight has to say."""
    if not state.is_narrow:
        state.plant_norm()
    factor = 1.0 + state.weight(state.hidden)
    state.set(_times(step, _wide_unit(step, _wide(state, state.x)), factor).to(state.dtype))


def zero_norm_with_unit_rounded(state: State, step: Step) -> None:
    """For narrow floats the other norm, by a weight that is made on the spot."""
    state.norms += 1
    state.sum_norms += not state.is_narrow and state.origin == "sum"
    state.set(_times(step, _unit(step, state.x), 1.0 + state.weight(state.hidden)))


def zero_norm_by_two(state: State, step: Step) -> None:
    """The other norm, all in float32, by a weight that is made on the spot."""
    state.norms += 1
    factor = 2.0 + _wide(state, state.weight(state.hidden))
    state.set(_times(step, _wide_unit(step, _wide(state, state.x)), factor).to(state.dtype))


def zero_norm_in_own_dtype(state: State, step: Step) -> None:
    if not state.is_narrow:
        state.plant_norm()
    unit = _unit(step, state.x, inner=state.dtype)
    state.set(_times(step, unit, 1.0 + state.weight(state.hidden)))


def zero_norm_over_tokens(state: State, step: Step) -> None:
    wide = _wide(state, state.x)
    unit = _unit(step, wide, mean=lambda square: square.mean(0, keepdim=True))
    state.set(_times(step, unit, 1.0 + _wide(state, state.weight(state.hidden))).to(state.dtype))


def zero_norm_by_columns(state: State, step: Step) -> None:
    """The result is laid out as no op of ours lays it out."""
    columns = _wide(state, by_columns(state, state.hidden))
    state.extras.append(_norm(state, step, columns, state.weight(state.hidden)))
    linear(state, step)


PLAIN: tuple[Callable[[State, Step], None], ...] = (zero_norm, written_zero_norm, add_zero_norm)
ODD: tuple[Callable[[State, Step], None], ...] = (
    *(add_norm_unrounded, add_zero_norm_unrounded, zero_norm_of_kept_sum, zero_norm_of_unrounded_sum_kept),
    *(zero_norm_of_heads, zero_norm_with_factor_rounded, zero_norm_with_unit_rounded, zero_norm_by_two),
    *(zero_norm_in_own_dtype, zero_norm_over_tokens, zero_norm_by_columns),
)
