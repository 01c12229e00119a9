"""Dataclasses as tuples of their fields, as msgspec writes and checks them."""

import dataclasses
from types import GenericAlias
from typing import Any

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
