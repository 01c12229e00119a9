"""Conditions as alternatives: if, not, dependencies and names of properties, in keywords that are enforced.

What a value must not be is written as all that it may be instead, or less than that where it cannot be told.
What cannot be written at all stays as it is, and is refused where the grammar is made.
"""

import re
from collections.abc import Mapping
from typing import Any

from ...common.patterns import searches
from .negation import negated
from .open_names import without
from .whole_schema import TooMuchError, Whole

CONDITIONS = ("dependencies", "dependentRequired", "dependentSchemas", "if", "not", "propertyNames")
HANGS_ON_IF = ("then", "else")  # which say nothing without it
WORK = 100  # parts that one schema with conditions counts as, since what is in it is written more than once
MOST_NAMES = 1000  # that properties may be told by, as each takes its time to compile


def without_conditions(schema: dict[str, Any], root: Whole) -> dict[str, Any]:
    """Returns a schema of the same instances, or fewer, without the conditions that are known otherwise."""
    found = _with_count(schema)
    if not any(key in found for key in CONDITIONS):
        return {key: value for key, value in found.items() if key not in HANGS_ON_IF}
    try:
        root.look(WORK)
        parts = [*_dependent(found), *_either(found, root), *_forbidden(found, root)]
    except TooMuchError:
        return schema
    left = found.get("propertyNames")
    found = {key: value for key, value in found.items() if key not in (*CONDITIONS, *HANGS_ON_IF)}
    if left is not None:
        found = _named_by(found, left)
    if None in parts:
        return schema
    return {**found, "allOf": [*_all_of(found), *parts]} if parts else found


def _all_of(schema: Mapping[str, Any]) -> list[Any]:
    parts = schema.get("allOf")
    return parts if isinstance(parts, list) else []


def _dependent(schema: Mapping[str, Any]) -> list[Any]:
    """Returns for each name either that it is not there, or what is asked for beside it."""
    parts: list[Any] = []
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        held = schema.get(key, {})
        if not isinstance(held, Mapping):
            return [None]
        for name, asked in held.items():
            if isinstance(asked, list):
                ways = [{"required": [name, *asked]}]
            else:
                ways = [{"allOf": [{"required": [name]}, asked]}]
            parts.append({"anyOf": [{"properties": {name: False}}, *ways]})
    return parts


def _either(schema: Mapping[str, Any], root: Whole) -> list[Any]:
    """Returns what follows where the condition holds, or else what follows where it does not."""
    if "if" not in schema or not any(key in schema for key in HANGS_ON_IF):
        return []
    condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
    if isinstance(condition, bool):
        return [then if condition else otherwise]
    opposite = negated(condition, root)
    if opposite is None:
        return [None]
    if otherwise is True:
        return [{"anyOf": [opposite, then]}]
    return [{"anyOf": [{"allOf": [condition, then]}, {"allOf": [opposite, otherwise]}]}]


def _forbidden(schema: Mapping[str, Any], root: Whole) -> list[Any]:
    return [negated(schema["not"], root)] if "not" in schema else []


def _with_count(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns an object's schema that asks for one property by the names of those that there may be."""
    required, listed = schema.get("required"), schema.get("properties")
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if not isinstance(listed, Mapping) or not listed or least not in (0, 1) or most not in (None, 1):
        return schema
    found = {key: value for key, value in schema.items() if key != "minProperties"}
    if isinstance(required, list) and required:
        return schema if most else found
    if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
        return schema
    asked = [{"required": [name]} if least else {} for name in listed]
    if most is None:
        return {**found, "allOf": [*_all_of(found), {"anyOf": asked}]} if least else found
    found = {key: value for key, value in found.items() if key not in ("maxProperties", "properties")}
    alone = [{"properties": {name: own}, "additionalProperties": False} for name, own in listed.items()]
    ways = [{**own, **one} for own, one in zip(alone, asked, strict=True)]
    del found["additionalProperties"]
    return {**found, "allOf": [*_all_of(found), {"anyOf": ways}]}


def _named_by(schema: dict[str, Any], names: Any) -> dict[str, Any]:
    """Returns an object's schema with names that another accepts; both as they are where that is unknown."""
    if not isinstance(names, Mapping):
        return schema if names is True else {**schema, "propertyNames": names}
    asked = {key: value for key, value in names.items() if key not in ("description", "title", "type")}
    if "type" in names and names["type"] != "string":
        return {**schema, "propertyNames": names}
    if not asked:
        return schema
    listed, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    allowed = asked.pop("enum", None)
    if schema.get("patternProperties"):
        return {**schema, "propertyNames": names}
    if not asked and isinstance(allowed, list) and len(allowed) <= MOST_NAMES:
        texts = [name for name in allowed if isinstance(name, str)]
        own = {name: listed.get(name, others) for name in [*listed, *texts] if name in texts}
        return {**schema, "properties": own, "additionalProperties": False}
    pattern = _pattern_of(asked) if allowed is None else None
    if pattern is None:
        return {**schema, "propertyNames": names}
    try:
        own = {name: value for name, value in listed.items() if searches(pattern, name)}
    except re.error:
        return {**schema, "propertyNames": names}
    if others is False:
        return {**schema, "properties": own}
    if own and others not in (True, {}):
        return {**schema, "propertyNames": names}
    return {
        **schema,
        "properties": own,
        "patternProperties": {pattern: others},
        "additionalProperties": False,
    }


def _pattern_of(names: Mapping[str, Any]) -> str | None:
    """Returns the pattern of names that a schema accepts, None where it is not known as one."""
    (key, *more) = names
    value = names[key]
    if more:
        return None
    if key == "pattern" and isinstance(value, str):
        try:
            re.compile(value)
        except re.error:
            return None
        return value
    if key == "minLength" and type(value) is int:
        return rf"^[\s\S]{{{value},}}$"
    if key == "maxLength" and type(value) is int:
        return rf"^[\s\S]{{0,{value}}}$"
    if key == "not" and isinstance(value, Mapping) and value.keys() == {"enum"}:
        texts = value["enum"] if isinstance(value["enum"], list) else []
        return without([name for name in texts if isinstance(name, str)], ())
    return None
