"""Bodies of requests as checked structs: each field by its name, errors by the place at fault."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from ...common.errors import MOST_SHOWN, RequestError, clipped, shown
from ..errors import ApiError, api_error
from .mismatch import NO_JSON, clipped_json, malformed, mismatch, struct_in, types_of
from .mismatch import wrong as wrong

IN_THREAD = 256 * 1024  # bytes of a body from which it is decoded beside the event loop
MOST_FIELD = 64 * 1024  # bytes of a field, but for those that hold texts and token ids
MOST_VALUES = 2**19  # of a body, as commas tell; so many numbers take some tens of milliseconds
MOST_OBJECTS = 2**16  # of a body, lists among them, which take longer
TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
MOST_NAMED = 16  # ignored fields that are told


@dataclass(frozen=True, kw_only=True, slots=True)
class Unserved:
    """A field that would change the answer and is not served: refused, unless its value asks for nothing."""

    why: str
    neutral: tuple[Any, ...] = ()


class Body(msgspec.Struct, kw_only=True, frozen=True):
    """What every body of a request is made of; null stands for a field that is absent."""

    unserved: ClassVar[Mapping[str, Unserved]] = {}
    accepted: ClassVar[frozenset[str]] = frozenset()  # fields that change no answer, ignored in silence
    large: ClassVar[frozenset[str]] = frozenset()  # fields of more than MOST_FIELD bytes

    model: str | None = None
    """A name of the model; otherwise the first of its names."""


Kind = TypeVar("Kind", bound=Body)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded(Generic[Kind]):
    """A body, and which of its fields mean nothing here."""

    request: Kind
    ignored_fields: tuple[str, ...] = ()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer that tell of ignored fields; none where there are none."""
        if not self.ignored_fields:
            return {}
        named = [clean_name(name) for name in self.ignored_fields[:MOST_NAMED]]
        more = len(self.ignored_fields) - len(named)
        return {"X-Lamina-Ignored-Fields": ", ".join(named) + (f", and {more} more" if more else "")}


async def decode_async(kind: type[Kind], body: bytes, *, strict: bool = False) -> Decoded[Kind]:
    """Returns decode(kind, body); a large body is decoded in a thread, so that others go on meanwhile."""
    if len(body) <= IN_THREAD:
        return decode(kind, body, strict=strict)
    return await asyncio.to_thread(decode, kind, body, strict=strict)


def decode(kind: type[Kind], body: bytes, *, strict: bool = False) -> Decoded[Kind]:
    """Returns a body of JSON as a struct of that kind, and the names of fields that it does not know.

    strict: unknown fields are refused. Raises ApiError 400 for whatever is wrong, with the field's path as
    its param.
    """
    known = _fields_of(kind)
    ignored: list[str] = []
    values: dict[str, Any] = {}
    for name, piece in _pieces(body).items():
        if name in known:
            if piece != b"null" or known[name].required:
                values[name] = _decoded(name, piece, known[name], name in kind.large)
                if b"{" in piece:
                    ignored += _unknown_inside(name, piece, known[name].type)
        elif name in kind.unserved:
            _refuse_unserved(name, piece, kind.unserved[name])
        elif name not in kind.accepted:
            ignored.append(name)
    if strict and ignored:
        raise wrong(ignored[0], f"{shown(ignored[0])} is no field of this request; leave it out")
    for name in _required_of(kind):
        if name not in values:
            raise wrong(name, f"{name} is missing; it is required")
    return Decoded(request=kind(**values), ignored_fields=tuple(ignored))


def placed(error: RequestError, where: str) -> ApiError:
    """Returns the answer to an error of the library about what stands there in the body."""
    found = api_error(error)
    found.param = where
    return found


@contextmanager
def renamed_by(rename: Callable[[str], str], in_message: Callable[[str], str]) -> Iterator[None]:
    """Has errors of the chat that a request is made into name the fields of the request."""
    try:
        yield
    except ApiError as error:
        error.param = error.param and rename(error.param)
        error.message = in_message(error.message)
        raise


def clean_name(name: str) -> str:
    """Returns a name that a client made up as it may stand in a header: short, printable, of ASCII."""
    return re.sub(r"[^\x21-\x2b\x2d-\x7e]", "?", name[:64])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Field:
    type: Any
    required: bool
    decoder: "msgspec.json.Decoder[Any]"


@lru_cache(maxsize=64)
def _fields_of(kind: type[Body]) -> dict[str, _Field]:
    return {
        field.encode_name: _Field(
            type=field.type, required=field.required, decoder=msgspec.json.Decoder(field.type)
        )
        for field in msgspec.structs.fields(kind)
    }


@lru_cache(maxsize=64)
def _required_of(kind: type[Body]) -> tuple[str, ...]:
    return tuple(name for name, field in _fields_of(kind).items() if field.required)


class _Name(str):
    """A field's name that equals no other, so that one given twice is seen twice."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


_TOP = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=lambda kind, value: kind(value))


def _pieces(body: bytes) -> dict[str, bytes]:
    """Returns the JSON of each field of an object, after what is quick to see of the whole."""
    _check_size(body)
    try:
        found = _TOP.decode(body)
    except msgspec.ValidationError:
        raise wrong(None, f"the body is {clipped_json(body.strip())}; wanted a JSON object") from None
    except NO_JSON as error:
        raise malformed(None, body, error) from None
    pieces: dict[str, bytes] = {}
    for name, piece in found.items():
        plain = str.__str__(name)
        if plain in pieces:
            raise wrong(plain, f"{shown(plain)} stands in the body twice; wanted once")
        pieces[plain] = bytes(piece)
    return pieces


def _check_size(body: bytes) -> None:
    """Raises ApiError for a body of so many values that reading it would hold others up.

    What stands in texts does not count, which is looked at only where there is much of it.
    """
    if _num_values(body, 0, len(body)) <= MOST_VALUES and _num_objects(body, 0, len(body)) <= MOST_OBJECTS:
        return
    num_values = num_objects = place = 0
    for text in TEXT.finditer(body):
        num_values += _num_values(body, place, text.start())
        num_objects += _num_objects(body, place, text.start())
        place = text.end()
        if num_values > MOST_VALUES or num_objects > MOST_OBJECTS:
            break
    num_values += _num_values(body, place, len(body))
    num_objects += _num_objects(body, place, len(body))
    if num_values > MOST_VALUES:
        raise wrong(None, f"the body holds more than {MOST_VALUES} values; wanted fewer in one request")
    if num_objects > MOST_OBJECTS:
        raise wrong(None, f"the body holds more than {MOST_OBJECTS} objects and lists; wanted fewer")


def _num_values(body: bytes, start: int, end: int) -> int:
    return body.count(b",", start, end)


def _num_objects(body: bytes, start: int, end: int) -> int:
    return body.count(b"{", start, end) + body.count(b"[", start, end)


def _decoded(name: str, piece: bytes, field: _Field, is_large: bool) -> Any:
    """Returns the value of a field; ApiError names the place in it that is wrong."""
    if len(piece) > MOST_FIELD and not is_large:
        raise wrong(name, f"{name} is {len(piece)} bytes long; wanted at most {MOST_FIELD}")
    try:
        return field.decoder.decode(piece)
    except msgspec.ValidationError as error:
        raise mismatch(name, piece, field.type, str(error)) from None
    except NO_JSON as error:
        raise malformed(name, piece, error) from None


def _unknown_inside(name: str, piece: bytes, type_: Any) -> Iterator[str]:
    """Yields fields inside a field that its struct does not know; ApiError for one given twice."""
    try:
        value = _NESTED.decode(piece.decode())
    except _Twice as twice:
        raise wrong(name, f"{name} has {shown(twice.args[0])} twice in one object; wanted once") from None
    except (ValueError, RecursionError) as error:
        raise wrong(name, f"{name} cannot be read: {clipped(str(error), MOST_SHOWN)}") from None
    yield from _unknown(name, value, type_)


def _unknown(path: str, value: Any, type_: Any) -> Iterator[str]:
    """Yields the paths of fields in a value that its struct, or a list of them, does not know."""
    if not isinstance(value, (dict, list)) or (struct := struct_in(type_)) is None:
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(f"{path}[{index}]", item, struct)
        return
    known, unserved = types_of(struct), getattr(struct, "unserved", {})
    for key, item in value.items():
        if key in known:
            yield from _unknown(f"{path}.{key}", item, known[key])
        elif key in unserved:
            check_unserved(f"{path}.{key}", item, unserved[key])
        elif item is not None:
            yield f"{path}.{key}"


class _Twice(Exception):
    """A name that an object has twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _Twice(name)
    return found


_NESTED = json.JSONDecoder(object_pairs_hook=_once)  # made once, which costs more than to use it


def _refuse_unserved(name: str, piece: bytes, field: Unserved) -> None:
    if len(piece) > MOST_FIELD:
        raise not_served(name, clipped_json(piece), field)
    try:
        value = msgspec.json.decode(piece)
    except NO_JSON as error:
        raise malformed(name, piece, error) from None
    check_unserved(name, value, field)


def check_unserved(path: str, value: Any, field: Unserved) -> None:
    """Raises ApiError unless the value of a field that is not served asks for nothing."""
    if value is None or any(type(value) is type(each) and value == each for each in field.neutral):
        return
    raise not_served(path, clipped_json(json.dumps(value).encode()), field)


def not_served(path: str, got: str, field: Unserved) -> ApiError:
    """Returns the error of a field that is known and not served."""
    return wrong(path, f"{path} is {got}, and is not served: {field.why}", code="unsupported_field")
