"""oneOf as anyOf of ways that are told apart: no value that one of them accepts is accepted by another.

Ways are told apart by their types, by the values of a property, by a name that one requires and another then
goes without, or by their own values. Those that are not stay oneOf.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .whole_schema import TooMuchError, Whole

TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
OF_OBJECTS = frozenset(("properties", "required", "additionalProperties", "patternProperties"))
DEEPEST = 4  # of unions in unions, as types are looked for
Values = frozenset[str] | None  # as JSON; None: not a known few


def exclusive(schema: dict[str, Any], root: Whole) -> dict[str, Any]:
    """Returns the schema with anyOf in place of oneOf where its ways are, or can be, told apart.

    A way may be left with fewer instances. root: the whole schema, in which references are found.
    """
    ways = schema.get("oneOf")
    if not isinstance(ways, list) or len(ways) < 2 or not all(isinstance(way, Mapping) for way in ways):
        return schema
    around = {key: value for key, value in schema.items() if key != "oneOf"}
    try:
        found = _all_apart(around, ways, root)
    except TooMuchError:
        return schema
    if found is None:
        return schema
    if "anyOf" in around:
        return {**around, "allOf": [*around.get("allOf", []), {"anyOf": found}]}
    return {**around, "anyOf": found}


def _all_apart(around: Mapping[str, Any], ways: Sequence[Mapping[str, Any]], root: Whole) -> list[Any] | None:
    root.look(len(ways) ** 2)
    views = [_View(around, way, root) for way in ways]
    found: list[Any] = []
    for number, view in enumerate(views):
        way = _apart(ways[number], view, views[:number] + views[number + 1 :])
        if way is None:
            return None
        found.append(way)
    return found


class _View:
    """What every instance of a way is known to have, and what no value without it is."""

    def __init__(
        self, around: Mapping[str, Any], way: Mapping[str, Any], root: Whole, depth: int = 0
    ) -> None:
        parts = [*_parts(around, root, 0), *_parts(way, root, 0)]
        self.types = frozenset.intersection(TYPES, *(_types(part, root, depth) for part in parts))
        self.values = _common(_values(part) for part in parts)
        self.required: dict[str, None] = {}  # in order
        self.named: dict[str, Values] = {}
        self.types_of: dict[str, frozenset[str]] = {}  # of named properties
        self.allowed: frozenset[str] | None = None  # names, where there are no others
        for part in parts:
            self.required |= dict.fromkeys(_names(part))
            properties = part.get("properties")
            properties = properties if isinstance(properties, Mapping) else {}
            root.look(len(properties))
            for name, own in properties.items():
                known = [_values(inner) for inner in _parts(own, root, 0)]
                self.named[name] = _common([self.named.get(name), *known])
                types = [_types(inner, root, depth + 1) for inner in _parts(own, root, 0)]
                self.types_of[name] = frozenset.intersection(self.types_of.get(name, TYPES), *types)
            if part.get("additionalProperties") is False and not part.get("patternProperties"):
                self.allowed = frozenset(properties) & (self.allowed or frozenset(properties))
        self.is_of_objects = any(not OF_OBJECTS.isdisjoint(part) for part in _parts(way, root, 0))

    def narrower(self, types: frozenset[str], other: "_View") -> Iterator[frozenset[str]]:
        """Yields types that this way might be left with to be apart from another, the most first."""
        yield types
        if self.is_of_objects and "object" in types:
            yield (types - other.types) | {"object"}
        yield types - other.types


def _apart(way: Mapping[str, Any], view: _View, others: Sequence[_View]) -> dict[str, Any] | None:
    """Returns a way of which no instance is one of another's; None where that is not known."""
    types = view.types
    absent: dict[str, bool] = {}
    needed: list[dict[str, Any]] = []  # of whose names there is one
    for other in others:
        apart = next((each for each in view.narrower(types, other) if _is_apart(each, view, other)), None)
        if not apart and view.is_of_objects and "object" in types:
            apart = (types - other.types) | {"object"}
            names = [name for name in other.required if name not in view.required]
            own = [name for name in view.named if other.allowed is not None and name not in other.allowed]
            if names:
                absent[min(names, key=lambda name: name in view.named)] = False
            elif own:
                needed.append({"anyOf": [{"required": [name]} for name in own]})
            else:
                return None
        if not apart:
            return None
        types = apart
    found = dict(way) if types == view.types and not absent else _with(way, types, absent)
    return {"allOf": [found, *needed]} if needed else found


def _with(way: Mapping[str, Any], types: frozenset[str], absent: Mapping[str, bool]) -> dict[str, Any]:
    """Returns a way with fewer types, and without names; beside what it says, where that is to be had."""
    more: dict[str, Any] = {"type": sorted(types)} if len(types) > 1 else {"type": min(types)}
    more |= {"properties": dict(absent)} if absent else {}
    if "$ref" in way or not more.keys().isdisjoint(way):
        return {"allOf": [dict(way), more]}
    return {**way, **more}


def _is_apart(types: frozenset[str], one: _View, other: _View) -> bool:
    """Whether no value of these types that is an instance of one is an instance of the other."""
    shared = types & other.types
    if not shared or (
        one.values is not None and other.values is not None and one.values.isdisjoint(other.values)
    ):
        return True
    if shared != {"object"}:
        return False
    for name in {**one.required, **other.required}:
        if any(view.allowed is not None and name not in view.allowed for view in (one, other)):
            return True
        values, others = one.named.get(name), other.named.get(name)
        if values is not None and others is not None and values.isdisjoint(others):
            return True
        if one.types_of.get(name, TYPES).isdisjoint(other.types_of.get(name, TYPES)):
            return True
    return False


def _parts(schema: Any, root: Whole, depth: int) -> list[Mapping[str, Any]]:
    """Returns schemas of which an instance of this is one, as far as references and allOf tell."""
    root.look()
    if not isinstance(schema, Mapping) or depth > 8:
        return []
    found = [schema]
    for part in schema.get("allOf") or () if isinstance(schema.get("allOf"), list) else ():
        found += _parts(part, root, depth + 1)
    if isinstance(schema.get("$ref"), str):
        found += _parts(root.resolved(schema["$ref"]), root, depth + 1)
    return found


def _types(schema: Mapping[str, Any], root: Whole, depth: int) -> frozenset[str]:
    """Returns the types that instances may have."""
    types = schema.get("type")
    listed = [types] if isinstance(types, str) else types
    found = TYPES
    if isinstance(listed, list):
        found = frozenset("number" if each == "integer" else each for each in listed if isinstance(each, str))
    for key in ("anyOf", "oneOf"):
        ways = schema.get(key)
        if (
            isinstance(ways, list)
            and ways
            and depth < DEEPEST
            and all(isinstance(way, Mapping) for way in ways)
        ):
            found &= frozenset.union(*(_View({}, way, root, depth + 1).types for way in ways))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found & {type_of(value) for value in values} if isinstance(values, list) else found


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "number")


def _values(schema: Mapping[str, Any]) -> Values:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return None
    return frozenset(json.dumps(_plain(value), sort_keys=True) for value in values)


def _plain(value: Any) -> Any:
    """Returns a value as others that equal it are written: 1.0 is 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _common(every: Any) -> Values:
    known = [values for values in every if values is not None]
    return frozenset.intersection(*known) if known else None


def _names(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
