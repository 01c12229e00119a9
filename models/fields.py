"""Typed reading of JSON objects, with errors that name the field, its value and what was wanted."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.errors import ConfigError, LoadError

LFS_POINTER = b"version https://git-lfs"
INT32_MAX = 2**31 - 1  # sizes and ids are kept in 32 bits
_REQUIRED: Any = object()


def whole_file(path: Path) -> Path:
    """The path, if a file lies there; LoadError says what lies there else.

    A folder, a link to nowhere, and the note that git leaves where git-lfs has not fetched the file.
    """
    if not path.exists():
        lost = f"is a link to {os.readlink(path)}, which does" if path.is_symlink() else "does"
        raise LoadError(f"{path} {lost} not exist; download it again")
    if not path.is_file():
        raise LoadError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}; wanted a file")
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise LoadError(
                f"{path} is a pointer of git-lfs to a file that was not fetched; run `git lfs pull` in "
                f"{path.parent}"
            )
    return path


def read_text(path: Path) -> str:
    """The text of a file in UTF-8."""
    try:
        return whole_file(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read as text: {error}; download it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object a file holds."""
    value = _read(path)
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds {type(value).__name__}, wanted a JSON object; download it again")
    return value


def read_json_list(path: Path) -> list[Any]:
    """The JSON list a file holds."""
    value = _read(path)
    if not isinstance(value, list):
        raise LoadError(f"{path} holds {type(value).__name__}, wanted a JSON list; download it again")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(whole_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read as JSON: {error}; download it again") from error


class Fields:
    """A JSON object whose values are asked for by type; null counts as absent, and has the default.

    ConfigError, naming field and file, for a value of another type or beyond its bounds, and for one that is
    absent and has no default.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    @property
    def unread(self) -> dict[str, Any]:
        """The values that nobody asked for."""
        return {
            name: value
            for name, value in self.values.items()
            if value is not None and name not in self._asked
        }

    def integer(
        self, name: str, default: Any = _REQUIRED, *, minimum: int = 1, maximum: int = INT32_MAX
    ) -> Any:
        """An integer from `minimum` to `maximum`; bools and floats are refused."""
        value = self._value(name, default)
        if value is not default and not _is_integer(value, minimum, maximum):
            raise self.error(name, value, f"an integer >= {minimum}, <= {maximum}")
        return value

    def number(
        self,
        name: str,
        default: Any = _REQUIRED,
        *,
        minimum: float = 0.0,
        maximum: float = math.inf,
        positive: bool = False,
    ) -> Any:
        """A finite number from `minimum` (above zero where `positive`) to `maximum`, as float."""
        value = self._value(name, default)
        if value is default:
            return value
        if not _is_number(value) or not minimum <= value <= maximum or (positive and value <= 0):
            wanted = "a number > 0" if positive else f"a number >= {minimum:g}"
            raise self.error(name, value, wanted if maximum == math.inf else f"{wanted}, <= {maximum:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """A string."""
        value = self._value(name, default)
        if value is not default and not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object, empty where absent."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers, empty where absent."""
        items = self._list(name)
        if not all(map(_is_number, items)):
            raise self.error(name, self.values[name], "a list of numbers")
        return tuple(float(x) for x in items)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty where absent."""
        items = self._list(name)
        if not all(isinstance(x, str) for x in items):
            raise self.error(name, self.values[name], "a list of strings")
        return items

    def _list(self, name: str) -> tuple[Any, ...]:
        value = self._value(name, ())
        if not isinstance(value, list | tuple):
            raise self.error(name, value, "a list")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where absent."""
        value = self._value(name, ())
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(_is_integer(id_, 0, INT32_MAX) for id_ in ids):
            raise self.error(name, value, "a token id >= 0 or a list of them")
        return ids

    def error(self, name: str, value: Any, wanted: str) -> ConfigError:
        """What to raise for a value that cannot be honoured."""
        return ConfigError(f"{self.origin}: {name} is {value!r:.200}; wanted {wanted}")

    def _value(self, name: str, default: Any) -> Any:
        self._asked.add(name)
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"{self.origin}: {name} is missing")
        return default


def _is_integer(value: Any, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold."""
    is_kind = isinstance(value, int | float) and not isinstance(value, bool)
    return is_kind and abs(value) <= sys.float_info.max
