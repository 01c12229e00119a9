"""Fragments of norms of query and key heads, which are parts of one tensor, and what only looks like it."""

from collections.abc import Callable

from torch import Tensor

from ..models.layers import FAST_OPS
from .fragments import State, Step, apply_linear

QUERIES, KEYS, HEADS = 2, 1, 4


def _qkv(state: State) -> Tensor:
    """[T, heads, hidden]: queries, keys, values."""
    return apply_linear(state, state.x, HEADS * state.hidden).view(-1, HEADS, state.hidden)


def _parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return qkv[:, :QUERIES], qkv[:, QUERIES : QUERIES + KEYS], qkv[:, QUERIES + KEYS :]


def _norm(
    state: State, step: Step, x: Tensor, zero_centred: bool = False, eps: float | None = None
) -> Tensor:
    state.norms += 1
    norm = FAST_OPS.zero_centred_rms_norm if zero_centred else FAST_OPS.rms_norm
    return norm(x, state.weight(x.shape[-1]), step.eps if eps is None else eps)


def _finish(state: State, query: Tensor, *others: Tensor) -> None:
    state.extras += others
    state.set(apply_linear(state, query.flatten(1), state.hidden), "gemm")


def head_norms(state: State, step: Step) -> None:
    """The key's first where `swapped`."""
    state.head_norms += 1
    query, key, value = _parts(_qkv(state))
    first, second = (key, query) if step.swapped else (query, key)
    _finish(state, _norm(state, step, first), _norm(state, step, second), value * 2)


def zero_centred_head_norms(state: State, step: Step) -> None:
    state.head_norms += 1
    query, key, _ = _parts(_qkv(state))
    _finish(state, *(_norm(state, step, part, zero_centred=True) for part in (query, key)))


def head_norms_twice(state: State, step: Step) -> None:
    for _ in range(2):
        head_norms(state, step)


def norms_of_all_heads(state: State, step: Step) -> None:
    """Two of the three are a pair."""
    state.head_norms += 1
    _finish(state, *(_norm(state, step, part) for part in _parts(_qkv(state))))


def norms_of_query_alone(state: State, step: Step) -> None:
    query, key, _ = _parts(_qkv(state))
    _finish(state, _norm(state, step, query), key * 2)


def head_norms_of_two_kinds(state: State, step: Step) -> None:
    query, key, _ = _parts(_qkv(state))
    _finish(state, _norm(state, step, query), _norm(state, step, key, zero_centred=True))


def head_norms_by_two_eps(state: State, step: Step) -> None:
    query, key, _ = _parts(_qkv(state))
    _finish(state, _norm(state, step, query), _norm(state, step, key, eps=step.eps * 2))


def head_norms_of_two_tensors(state: State, step: Step) -> None:
    (query, _, _), (_, key, _) = _parts(_qkv(state)), _parts(_qkv(state))
    _finish(state, _norm(state, step, query), _norm(state, step, key))


def head_norms_in_turn(state: State, step: Step) -> None:
    """The key's weight is known only after the query's norm."""
    query, key, _ = _parts(_qkv(state))
    query = _norm(state, step, query)
    weight = state.weight(state.hidden) * query.sum((0, 1))
    state.norms += 1
    _finish(state, query, FAST_OPS.rms_norm(key, weight, step.eps))


def norms_of_half_heads(state: State, step: Step) -> None:
    half = state.hidden // 2
    qkv = _qkv(state)
    left, right = (_norm(state, step, part) for part in (qkv[..., :half], qkv[..., half:]))
    _finish(state, left, right)


PLAIN: tuple[Callable[[State, Step], None], ...] = (head_norms, zero_centred_head_norms)
ODD: tuple[Callable[[State, Step], None], ...] = (
    *(head_norms_twice, norms_of_all_heads, norms_of_query_alone, head_norms_of_two_kinds),
    *(head_norms_by_two_eps, head_norms_of_two_tensors, head_norms_in_turn, norms_of_half_heads),
)
