"""Where an instance stands in its JSON schema: all schemas that may hold for a value there, and no fewer."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...common.patterns import searches
from .whole_schema import Whole

WAYS = ("allOf", "anyOf", "oneOf")
BOUNDS = ("const", "enum", "format", "maxLength", "pattern")  # of texts
OTHER_NAMES = ("additionalProperties", "unevaluatedProperties")
OTHER_ITEMS = ("items", "additionalItems", "unevaluatedItems")


class Place:
    """A place of instances; where schemas are alternatives it has them all."""

    def __init__(self, places: "Places", schemas: tuple[Mapping[str, Any], ...]) -> None:
        self._places, self._schemas = places, schemas
        bounded = [key for schema in schemas for key in BOUNDS if key in schema]
        self.has_free_texts = not bounded  # each text of it can go on as one that was not there before
        self.has_unique_items = any(schema.get("uniqueItems") is True for schema in schemas)

    def property(self, name: str) -> "Place":
        """Returns the place of a property's value."""
        return self._places.of(schema for each in self._schemas for schema in _of_name(each, name))

    def item(self, index: int) -> "Place":
        """Returns the place of an item."""
        return self._places.of(schema for each in self._schemas for schema in _of_index(each, index))


class Places:
    """All places of one schema, each made when something stands there first."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = Whole(schema)
        self._made: dict[tuple[int, ...], Place] = {}
        self.first = self.of([schema])

    def of(self, schemas: Iterable[Any]) -> Place:
        """Returns the place where one of these schemas, or all, may hold."""
        found: dict[int, Mapping[str, Any]] = {}
        waiting = list(schemas)
        while waiting:
            schema = waiting.pop()
            if isinstance(schema, Mapping) and id(schema) not in found:
                found[id(schema)] = schema
                waiting += self._parts(schema)
        key = tuple(sorted(found))
        if key not in self._made:
            self._made[key] = Place(self, tuple(found.values()))
        return self._made[key]

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        for key in WAYS:
            ways = schema.get(key)
            yield from ways if isinstance(ways, list) else ()
        if isinstance(schema.get("$ref"), str):
            yield self._root.resolved(schema["$ref"])


def _of_name(schema: Mapping[str, Any], name: str) -> Iterator[Any]:
    listed, patterns = schema.get("properties"), schema.get("patternProperties")
    is_known = isinstance(listed, Mapping) and name in listed
    if isinstance(listed, Mapping) and is_known:
        yield listed[name]
    for pattern, own in patterns.items() if isinstance(patterns, Mapping) else ():
        if _may_match(pattern, name):
            is_known = True
            yield own
    for key in () if is_known else OTHER_NAMES:
        yield schema.get(key)


def _may_match(pattern: str, name: str) -> bool:
    try:
        return searches(pattern, name)
    except re.error:
        return True


def _of_index(schema: Mapping[str, Any], index: int) -> Iterator[Any]:
    for key in ("prefixItems", "items"):
        first = schema.get(key)
        if isinstance(first, list) and index < len(first):
            yield first[index]
            return
    for key in OTHER_ITEMS:
        yield schema.get(key)
