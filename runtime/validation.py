"""Single values that callers give: each comes back checked and in one stored form, or an error names it."""

import itertools
import math
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..common.errors import ConfigError, LaminaError, RequestError, shown

LARGEST = 2**31 - 1  # of a count or an id: what the device's columns hold
MAX_NAME, MAX_PATH = 255, 4095  # bytes that a file's name and its path may have
MAX_TEXT = 1 << 16  # characters of a setting; prompts are bounded by what fits


def as_int(value: object) -> int | None:
    """Returns an integer of Python, numpy or a tensor without dimensions as a plain int, else None.

    Truth values are no integers, of whatever library.
    """
    if type(value) is int:  # as nearly always
        return value
    if isinstance(value, bool) or not _is_scalar(value):
        return None
    try:
        return int.__pos__(operator.index(value))  # type: ignore[arg-type]  # a plain one of a subclass, too
    except Exception:  # a class of somebody else's: anything may come out of it
        return None


def as_float(value: object) -> float:
    """Returns a number of Python, numpy or a tensor without dimensions as a plain float, else NaN."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not _is_scalar(value):
        return math.nan
    if not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        return math.nan  # float() would read a text
    try:
        return float.__pos__(float(value))  # type: ignore[arg-type]
    except Exception:
        return math.nan


def integer(
    name: str,
    value: object,
    wanted: str,
    *,
    low: int,
    high: int = LARGEST,
    optional: bool = True,
    error: type[LaminaError] = RequestError,
) -> int | None:
    """Returns the value as a plain int from low to high, or None where it is optional and None.

    Raises `error`, saying what was wanted, for anything else.
    """
    if value is None and optional:
        return None
    plain = as_int(value)
    if plain is None or not low <= plain <= high:
        upper = f", at most {high}" if plain is not None and plain > high and str(high) not in wanted else ""
        raise error(f"{name} is {shown(value)}; wanted an integer, {wanted}{upper}")
    return plain


def number(
    name: str,
    value: Any,
    wanted: str,
    *,
    low: float = 0.0,
    high: float = math.inf,
    zero: bool = True,
    optional: bool = True,
    error: type[LaminaError] = RequestError,
) -> float | None:
    """Returns the value as a plain finite float from low to high, or None where it is optional and None.

    Raises `error`, saying what was wanted, for anything else, and for 0 where `zero` is False.
    """
    if value is None and optional:
        return None
    plain = as_float(value)
    if not (low <= plain <= high and plain < math.inf and (zero or plain != 0)):
        raise error(f"{name} is {shown(value)}; wanted a number, {wanted}")
    return plain


def items(name: str, values: Any, most: int) -> list[Any]:
    """Returns the entries of a sequence, at most so many; none for None.

    RequestError for strings, mappings, what is no sequence, and more entries.
    """
    if values is None:
        return []
    is_sequence = type(values) in (list, tuple) or (
        isinstance(values, Iterable) and not isinstance(values, (str, bytes, bytearray, Mapping))
    )
    if not is_sequence:
        raise RequestError(f"{name} is {shown(values)}; wanted a sequence")
    try:
        held = list(itertools.islice(values, most + 1))
    except Exception as error:  # a tensor without dimensions, or a program of the caller's
        raise RequestError(f"{name} is {shown(values)}; wanted a sequence: {shown(error)}") from error
    if len(held) > most:
        raise RequestError(f"{name} holds more than {most} entries; wanted at most so many")
    return held


def token_ids(name: str, values: Any, most: int) -> tuple[int, ...]:
    """Returns at most so many token ids as plain ints, none for None; RequestError for anything else."""
    plain = []
    for value in items(name, values, most):
        id_ = as_int(value)
        if id_ is None or not 0 <= id_ <= LARGEST:
            raise RequestError(f"{name} holds {shown(value)}; wanted token ids, 0 or more")
        plain.append(id_)
    return tuple(plain)


def text(name: str, value: object, *, verb: str = "is", wanted: str = "a string") -> str:
    """Returns a plain string of at most MAX_TEXT characters, all valid Unicode; RequestError for others."""
    if not isinstance(value, str):
        raise RequestError(f"{name} {verb} {shown(value)}; wanted {wanted}")
    value = str.__str__(value)  # before a subclass is asked anything
    if len(value) > MAX_TEXT:
        got = f"{name} {verb} {shown(value)} of {len(value)} characters"
        raise RequestError(f"{got}; wanted at most {MAX_TEXT}")
    check_unicode(name, value, verb=verb)
    return value


def check_unicode(name: str, value: str, *, verb: str = "holds") -> None:
    """Raises RequestError for a text with a lone surrogate, which cannot be encoded."""
    try:
        str.encode(value)
    except UnicodeEncodeError as error:
        near = value[max(0, error.start - 10) : error.start + 10]
        got = f"{name} {verb} {shown(near)}, at character {error.start}"
        raise RequestError(f"{got}; wanted valid Unicode, without lone surrogates") from None


def check_flag(name: str, value: object, error: type[LaminaError] = RequestError) -> None:
    """Raises `error` unless the value is True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} is {shown(value)}; wanted True or False")


def check_type(name: str, value: object, types: tuple[type, ...], wanted: str) -> None:
    """Raises ConfigError unless a setting is of one of these types; truth values are no integers."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ConfigError(f"{name} is {shown(value)}; wanted {wanted}")


def check_name(name: str, value: str | Path) -> None:
    """Raises ConfigError for what the system takes for no name: no encoding, a NUL in it, or too long."""
    try:
        encoded = os.fsencode(value)
    except UnicodeEncodeError:
        raise ConfigError(f"{name} is {shown(value)}; wanted valid Unicode, without surrogates") from None
    if b"\0" in encoded or max(map(len, encoded.split(b"/"))) > MAX_NAME or len(encoded) > MAX_PATH:
        wanted = f"wanted at most {MAX_PATH} bytes, {MAX_NAME} between slashes, and no NUL"
        raise ConfigError(f"{name} is {shown(value)}; {wanted}")


def _is_scalar(value: Any) -> bool:
    """Whether a value has no dimensions and is no truth value of an array library."""
    try:
        return tuple(getattr(value, "shape", ())) == () and "bool" not in str(getattr(value, "dtype", ""))
    except Exception:
        return False
