"""Patterns over FX nodes: what a formula looks like in ATen, and where a graph holds it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .graph import frozen

Binding = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Any_:
    """Anything; the same name must stand for the same thing everywhere in the pattern."""

    name: str
    accepts: Callable[[Any], bool] = field(default=lambda value: True)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of the targets; `name` binds its node, `commutes` lets its two operands swap."""

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    name: str | None = None
    commutes: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """The nodes a pattern covers, inside first, and what its names stand for."""

    root: fx.Node
    bound: Binding
    inside: frozenset[fx.Node]


def find(pattern: Call, node: fx.Node) -> Match | None:
    """The match of a pattern whose outermost call is this node, or None."""
    for bound, inside in _match(pattern, node, {}, frozenset()):
        return Match(root=node, bound=bound, inside=inside)
    return None


def _match(
    pattern: Any, value: Any, bound: Binding, inside: frozenset[fx.Node]
) -> list[tuple[Binding, frozenset[fx.Node]]]:
    """Every way in which a value fits; more than one only where operands commute."""
    if isinstance(pattern, Any_):
        return _match_any(pattern, value, bound, inside)
    if not isinstance(pattern, Call):
        return [(bound, inside)] if _are_same(pattern, value) else []
    if not isinstance(value, fx.Node) or value.target not in pattern.targets or value.kwargs:
        return []
    if pattern.name is not None:
        if bound.get(pattern.name, value) is not value:
            return []
        bound = bound | {pattern.name: value}
    orders = [value.args, value.args[::-1]] if pattern.commutes else [value.args]
    found = []
    for args in orders:
        found += _match_args(pattern.args, args, bound, inside | {value})
    return found


def _match_any(
    pattern: Any_, value: Any, bound: Binding, inside: frozenset[fx.Node]
) -> list[tuple[Binding, frozenset[fx.Node]]]:
    if pattern.name in bound:
        return [(bound, inside)] if _are_same(bound[pattern.name], value) else []
    return [(bound | {pattern.name: value}, inside)] if pattern.accepts(value) else []


def _are_same(one: Any, other: Any) -> bool:
    """Whether both are one node, or constants that compute the same."""
    return one is other or (not isinstance(other, fx.Node) and frozen(one) == frozen(other))


def _match_args(
    patterns: Sequence[Any], args: Sequence[Any], bound: Binding, inside: frozenset[fx.Node]
) -> list[Any]:
    if len(patterns) != len(args):
        return []
    states = [(bound, inside)]
    for pattern, value in zip(patterns, args, strict=True):
        states = [result for state in states for result in _match(pattern, value, *state)]
    return states
