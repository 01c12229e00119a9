"""What is wrong with a body: the path of the field at fault, what is there, and what was wanted."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, get_args

import msgspec

from ...common.errors import MOST_SHOWN
from ..errors import ApiError

MOST_SEARCHED = 256 * 1024  # bytes of what is no JSON, in which the place at fault is looked for
PLACE = re.compile(r" - at `(?:key in )?\$?(?P<path>.*)`$")
MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`")
STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]")  # not [...], any entry of a mapping
HALF = re.compile("[\ud800-\udfff]")
IN_JSON = {"int": "integer", "float": "number", "str": "string", "bool": "true or false", "array": "list"}
WORDS = re.compile(rf"\b({'|'.join(IN_JSON)})\b")
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def wrong(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Returns the error of a field that cannot be honoured."""
    return ApiError(status=400, message=message, param=param, code=code)


def mismatch(name: str, piece: bytes, type_: Any, message: str) -> ApiError:
    """Returns the error of a value of the wrong kind: its path, what it is, and what was wanted."""
    found = PLACE.search(message)
    said = message[: found.start()] if found else message
    steps = [step["name"] or int(step["index"]) for step in STEP.finditer(found["path"] if found else "")]
    path = name + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    if missing := MISSING.match(said):
        path = f"{path}.{missing['name']}"
        return wrong(path, f"{path} is missing; it is required")
    return wrong(path, f"{path} is {_value_at(piece, steps)}; wanted {_wanted(said, type_, steps)}")


def _value_at(piece: bytes, steps: Sequence[str | int]) -> str:
    """Returns the JSON of a value at a path, clipped."""
    value: Any = msgspec.Raw(piece)
    for step in steps:
        inside: Any = msgspec.json.decode(value, type=list[msgspec.Raw] | dict[str, msgspec.Raw])
        value = inside[step]
    return clipped_json(bytes(value))


def clipped_json(piece: bytes) -> str:
    text = piece[:MOST_SHOWN].decode(errors="ignore")
    return text if len(piece) <= MOST_SHOWN else f"{text}..."


def _wanted(said: str, type_: Any, steps: Sequence[str | int]) -> str:
    """Returns what msgspec expected, in JSON's words."""
    if not said.startswith("Expected "):
        for step in steps:
            struct = struct_in(type_)
            type_ = types_of(struct)[step] if struct and isinstance(step, str) else type_
        choices = [value for kind in (type_, *get_args(type_)) for value in get_args(kind)]
        named = [f'"{value}"' for value in choices if isinstance(value, str)]
        return f"one of {', '.join(named)}" if named else f"another value: {said}"
    wanted = said.partition(", got ")[0].removeprefix("Expected ").replace("`", "").replace(" | null", "")
    return WORDS.sub(lambda word: IN_JSON[word[0]], wanted)


def malformed(param: str | None, piece: bytes, error: Exception) -> ApiError:
    """Returns the error of what is no JSON, naming the field at fault where one can be told."""
    what = param or "the body"
    if isinstance(error, RecursionError):
        return wrong(param, f"{what} is nested too deep; wanted fewer levels")
    path, found = _oddity(piece)
    if found is not None:
        path = path if param is None else f"{param}{'' if path.startswith('[') or not path else '.'}{path}"
        said = f"{path or what} holds {found}, which JSON does not have; wanted another value"
        return wrong(path or None, said)
    return wrong(param, f"{what} is no JSON: {str(error).removeprefix('JSON is malformed: ')}")


def _oddity(piece: bytes) -> tuple[str, str | None]:
    """Returns where NaN, an infinity or half a character stands in what is JSON otherwise, and what it is."""
    if len(piece) > MOST_SEARCHED:
        return "", None
    try:
        value = json.loads(piece.decode(), parse_constant=_Constant)
    except (ValueError, RecursionError):
        return "", None
    return _odd_inside("", value)


class _Constant(str):
    """NaN or an infinity, by its name."""


def _odd_inside(path: str, value: Any) -> tuple[str, str | None]:
    if isinstance(value, _Constant):
        return path, str.__str__(value)
    if isinstance(value, str):
        half = HALF.search(value)
        return path, f"the lone surrogate \\u{ord(half[0]):04x}" if half else None
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in pairs:
        name = f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
        found = _odd_inside(f"{path}{name}", item)
        if found[1] is not None:
            return found
    return path, None


@lru_cache(maxsize=64)
def types_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


@lru_cache(maxsize=256)
def struct_in(type_: Any) -> type[msgspec.Struct] | None:
    """Returns the struct that a type is, or holds in a list or beside None; None where there is none."""
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return type_
    return next((found for found in map(struct_in, get_args(type_)) if found is not None), None)
