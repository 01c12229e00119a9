"""Dataclasses as tuples of their fields, as msgspec writes and checks them."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from types import GenericAlias, UnionType
from typing import Any, Union, get_args, get_origin

from ..sampling_params import SamplingParams

Fields = tuple["dataclasses.Field[Any]", ...]
ELSEWHERE = ("logits_processors", "structured_outputs")  # objects, and what goes as a grammar
PARAMS: Fields = tuple(each for each in dataclasses.fields(SamplingParams) if each.name not in ELSEWHERE)


def values_of(message: Any, fields: Fields) -> tuple[Any, ...]:
    """The values of these fields, in order."""
    return tuple(getattr(message, each.name) for each in fields)


def kinds_of(fields: Fields) -> Any:
    """The type of a tuple of their values."""
    return GenericAlias(tuple, tuple(each.type for each in fields))


def named(fields: Fields, values: tuple[Any, ...]) -> dict[str, Any]:
    """The values by the names of their fields."""
    return dict(zip([each.name for each in fields], values, strict=True))


def taken_apart(value: Any) -> Any:
    """A dataclass, or a tuple of some, as tuples and plain values; anything else as it is."""
    kind = type(value)
    if kind is tuple and value and dataclasses.is_dataclass(value[0]):
        return tuple(map(taken_apart, value))
    if not dataclasses.is_dataclass(kind):
        return value
    return tuple(taken_apart(getattr(value, name)) for name in _names(kind))


def put_together(kind: Any, values: Any) -> Any:
    """What was taken apart, of this dataclass."""
    if values is None:
        return None
    makers = zip(_names(kind), _makers(kind), values, strict=True)
    return kind(**{name: value if make is None else make(value) for name, make, value in makers})


def apart_kind(kind: Any) -> Any:
    """The type of what a value of this type is taken apart into, for a decoder."""
    if dataclasses.is_dataclass(kind):
        return GenericAlias(tuple, tuple(apart_kind(field.type) for field in dataclasses.fields(kind)))
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(apart_kind(each) for each in get_args(kind))]  # noqa: UP007
    if get_origin(kind) is tuple and dataclasses.is_dataclass(get_args(kind)[0]):
        return GenericAlias(tuple, (apart_kind(get_args(kind)[0]), ...))
    return kind


@lru_cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@lru_cache
def _makers(kind: Any) -> tuple[Callable[[Any], Any] | None, ...]:
    """How each field's value is put together again; None for what stays as it was decoded."""
    return tuple(_maker(field.type) for field in dataclasses.fields(kind))


def _maker(kind: Any) -> Callable[[Any], Any] | None:
    parts = get_args(kind)
    if get_origin(kind) is tuple and dataclasses.is_dataclass(parts[0]):
        return lambda each: tuple(put_together(parts[0], values) for values in each)
    own = next((part for part in (kind, *parts) if dataclasses.is_dataclass(part)), None)
    return None if own is None else lambda values: put_together(own, values)
