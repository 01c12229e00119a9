"""What no instance of a schema is, as a schema: all of it, or the part that can be told."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .lookarounds import texts_without
from .one_of import TYPES, type_of
from .open_names import without
from .whole_schema import Whole

DEEPEST = 12  # of schemas in what is turned round
Negation = Callable[[Any, Mapping[str, Any], Whole, int], Iterator[Any]]


def negated(schema: Any, root: Whole, depth: int = 0) -> Any:
    """Returns a schema whose instances are none of the given one's; None where no such is known.

    It has fewer instances than there are where a keyword is not known turned round.
    """
    root.look()
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return None
    if all(key in SAYS_NOTHING for key in schema):
        return False
    if root.is_early and "$ref" in schema:
        schema = {"$ref": schema["$ref"]}
    ways: list[Any] = []
    for key, value in schema.items():
        if key in OF_KEYWORDS:
            ways += OF_KEYWORDS[key](value, schema, root, depth + 1)
    ways = [way for way in ways if way is not None and way is not False]
    if not ways:
        return None
    return ways[0] if len(ways) == 1 else {"anyOf": ways}


SAYS_NOTHING = frozenset(("title", "description", "default", "examples", "$comment", "$id", "$schema"))


def _of_types(types: Iterable[str]) -> dict[str, Any] | None:
    names = sorted(types)
    return {"type": names[0] if len(names) == 1 else names} if names else None


def _type(value: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
    listed = [value] if isinstance(value, str) else value
    if isinstance(listed, list) and all(isinstance(each, str) for each in listed):
        yield _of_types(TYPES - {"number" if each == "integer" else each for each in listed})


def _enum(values: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
    if not isinstance(values, list):
        return
    yield _of_types(TYPES - {type_of(value) for value in values})
    texts = [value for value in values if isinstance(value, str)]
    if texts and (pattern := without(texts, ())) is not None:
        yield {"type": "string", "pattern": pattern}
    for flag in (True, False):
        if not any(value is flag for value in values) and any(isinstance(value, bool) for value in values):
            yield {"const": flag}
    yield from _between([value for value in values if type_of(value) == "number"])


def _between(values: Sequence[Any]) -> Iterator[Any]:
    """Yields the numbers beside these."""
    if not values:
        return
    ordered = sorted(values)
    yield {"type": "number", "exclusiveMaximum": ordered[0]}
    yield {"type": "number", "exclusiveMinimum": ordered[-1]}
    for low, high in itertools.pairwise(ordered):
        if low < high:
            yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}


def _const(value: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
    if root.has_const:
        yield from _enum([value], schema, root, depth)


def _required(names: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
    for name in names if isinstance(names, list) else ():
        yield {"type": "object", "properties": {name: False}}


def _properties(named: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
    for name, own in named.items() if isinstance(named, Mapping) else ():
        opposite = negated(own, root, depth)
        if opposite not in (None, False):
            yield {"type": "object", "properties": {name: opposite}, "required": [name]}


def _not(inner: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
    yield inner


def _all_of(parts: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
    for part in parts if isinstance(parts, list) else ():
        yield negated(part, root, depth)


def _any_of(ways: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
    opposites = [negated(way, root, depth) for way in ways] if isinstance(ways, list) else []
    if opposites and all(each not in (None, False) for each in opposites):
        yield {"allOf": opposites}


def _ref(ref: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
    yield negated(root.resolved(ref), root, depth) if isinstance(ref, str) else None


def _pattern(pattern: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
    other = texts_without(pattern) if isinstance(pattern, str) else None
    if other is not None:
        yield {"type": "string", "pattern": other}


def _bound(kind: str, name: str, by: int) -> Negation:
    def opposite(value: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
        if type(value) is int and value + by >= 0:
            yield {"type": kind, name: value + by}

    return opposite


def _limit(name: str, exclusive: str) -> Negation:
    def opposite(value: Any, schema: Mapping[str, Any], root: Whole, depth: int) -> Iterator[Any]:
        if type_of(value) == "number" and schema.get(exclusive) is not True:
            yield {"type": "number", name: value}

    return opposite


OF_KEYWORDS: dict[str, Negation] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "required": _required,
    "properties": _properties,
    "not": _not,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _any_of,
    "$ref": _ref,
    "pattern": _pattern,
    "minLength": _bound("string", "maxLength", -1),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1),
    "maxItems": _bound("array", "minItems", 1),
    "minimum": _limit("exclusiveMaximum", "exclusiveMinimum"),
    "maximum": _limit("exclusiveMinimum", "exclusiveMaximum"),
    "exclusiveMinimum": _limit("maximum", ""),
    "exclusiveMaximum": _limit("minimum", ""),
}
