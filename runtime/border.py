"""Single values at the border: each comes back right and in its one stored form, or RequestError names it."""

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from ..common.errors import RequestError


def as_int(value: object) -> int | None:
    """A Python, numpy or tensor integer as a plain one; None for anything else, bools included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # the TypeError is the question asked
    except TypeError:
        return None


def integer(
    name: str, value: object, wanted: str, *, low: int, high: int | None = None, optional: bool = True
) -> int | None:
    """An integer from low to high, or None where it may be left open."""
    if value is None and optional:
        return None
    plain = as_int(value)
    if plain is None or plain < low or (high is not None and plain > high):
        raise RequestError(f"{name} is {value!r}; wanted an integer, {wanted}")
    return plain


def number(
    name: str, value: Any, wanted: str, *, low: float = 0.0, high: float = math.inf, zero: bool = True
) -> float | None:
    """A finite number from low to high, 0 among them or not, or None."""
    if value is None:
        return None
    try:
        plain = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        plain = math.nan
    if not (low <= plain <= high and plain < math.inf and (zero or plain != 0)):
        raise RequestError(f"{name} is {value!r}; wanted a number, {wanted}")
    return plain


def iterate(name: str, value: Any) -> Iterable[Any]:
    """A sequence that is no string and no mapping, by its name."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {value!r}; wanted a sequence")
    return value


def token_ids(name: str, values: Any) -> tuple[int, ...]:
    """A sequence of ids as plain ints, by its name; None is none."""
    plain = []
    for value in () if values is None else iterate(name, values):
        id_ = as_int(value)
        if id_ is None or id_ < 0:
            raise RequestError(f"{name} holds {value!r}; wanted token ids, 0 or more")
        plain.append(id_)
    return tuple(plain)


def check_unicode(name: str, text: str) -> None:
    """RequestError for a text that no model can write: half of a surrogate pair is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds {text!r}; wanted valid Unicode, without lone surrogates") from None


def check_flag(name: str, value: object) -> None:
    """RequestError unless it is True or False."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; wanted True or False")
