"""Instances of JSON schemas, valid and not, by a seed; which they are jsonschema says, not what made them."""

import copy
import json
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

from schema_corpus import resolved, validator_of

TRIES = 60  # for each instance
WORDS = ("alpha", "Beta 2", "x", "naïve", "a/b-c_d", "日本", "", "the quick brown fox", '"q"\\', "0")
FORMATS = {
    "date-time": ("2024-02-29T12:30:00Z", "1999-12-31T23:59:59+01:00"),
    "date": ("2024-02-29", "1999-12-31"),
    "time": ("12:30:00Z", "23:59:59+01:00"),
    "duration": ("P1DT2H", "PT5M"),
    "email": ("a.b@example.org",),
    "hostname": ("www.example.org", "a-b.c"),
    "ipv4": ("192.168.0.1",),
    "ipv6": ("2001:db8::1", "::1"),
    "uri": ("https://example.org/a?b=c#d", "urn:a:b"),
    "uri-reference": ("/a/b?c", "https://example.org"),
    "iri": ("https://example.org/é",),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000",),
    "byte": ("YWJj", "YQ=="),
    "json-pointer": ("/a/0",),
    "regex": ("^a+$",),
}


def instances(schema: dict[str, Any], seed: str, count: int) -> tuple[list[Any], list[Any]]:
    """Returns up to so many instances that a schema accepts, and as many that it refuses, a change away."""
    rng, validator = random.Random(seed), validator_of(schema)
    maker = _Maker(schema, rng)
    valid: dict[str, Any] = {}
    for _ in range(count * TRIES):
        value = maker.value(schema, 0)
        if _is_valid(validator, value):
            valid.setdefault(json.dumps(value), value)
        if len(valid) == count:
            break
    invalid: dict[str, Any] = {}
    for _ in range(count * TRIES if valid else 0):
        value = _changed(copy.deepcopy(rng.choice(list(valid.values()))), rng)
        if not _is_valid(validator, value):
            invalid.setdefault(json.dumps(value), value)
        if len(invalid) == count:
            break
    return list(valid.values()), list(invalid.values())


def _is_valid(validator: Any, value: Any) -> bool:
    try:
        return bool(validator.is_valid(value))
    except RecursionError:
        return False


class _Maker:
    """Makes values after a schema, most of them instances of it; names come in the schema's order."""

    def __init__(self, root: dict[str, Any], rng: random.Random) -> None:
        self._root, self._rng = root, rng

    def value(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, dict):
            return self._rng.choice([1, "a", None, True, [], {}])
        schema = self._flat(schema, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._rng.choice(schema["enum"])
        return getattr(self, "_" + self._type(schema, depth))(schema, depth)

    def _flat(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """Returns a schema without references and unions: one way of those there are."""
        found = dict(schema)
        for _ in range(30):
            parts = []
            if isinstance(found.get("$ref"), str):
                parts.append(resolved(self._root, found.pop("$ref")))
            for key in ("oneOf", "anyOf"):
                ways = found.pop(key, None)
                if ways:
                    parts.append(self._rng.choice(ways if depth < 6 else ways[-2:]))
            parts += found.pop("allOf", [])
            if not parts:
                break
            for part in parts:
                if isinstance(part, dict):
                    found = _both(found, part)
        return found

    def _type(self, schema: dict[str, Any], depth: int) -> str:
        types = schema.get("type")
        if isinstance(types, list):
            types = self._rng.choice(types)
        if types is None:
            keys = {"properties": "object", "required": "object", "items": "array", "pattern": "string"}
            keys |= {"additionalProperties": "object", "minLength": "string", "minimum": "number"}
            keys |= {"patternProperties": "object", "format": "string", "maxLength": "string"}
            types = next((kind for key, kind in keys.items() if key in schema), None)
        return types or self._rng.choice(["string", "integer", "boolean", "null"])

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        found, required = {}, schema.get("required") or ()
        share = self._rng.choice([0.0, 0.3, 0.8]) if depth < 4 else 0.0
        named = schema.get("properties") or {}
        others = schema.get("additionalProperties", True)
        for name, own in named.items():
            if own is not False and (name in required or self._rng.random() < share):
                found[name] = self.value(own, depth + 1)
        for name in required:
            if name not in named:
                found[name] = self.value(others, depth + 1)
        more = 0 if depth >= 5 else self._rng.choice([0, 0, 1, 2])
        more = max(more, (schema.get("minProperties") or 0) - len(found))
        for pattern, own in (schema.get("patternProperties") or {}).items():
            for _ in range(more):
                found.setdefault(self._matching(pattern), self.value(own, depth + 1))
        if others is not False and not schema.get("patternProperties"):
            for _ in range(more):
                found.setdefault(f"x{self._rng.randrange(99)}", self.value(others, depth + 1))
        return found

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first, items = schema.get("prefixItems") or [], schema.get("items", True)
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", True)
        least = schema.get("minItems") or 0
        most = min(schema.get("maxItems", least + 3), least + 3)
        num = self._rng.randint(least, max(least, most if depth < 5 else least))
        num = min(num, len(first)) if items is False else num
        return [self.value(first[at] if at < len(first) else items, depth + 1) for at in range(num)]

    def _string(self, schema: dict[str, Any], depth: int) -> str:
        if isinstance(schema.get("pattern"), str):
            text = self._matching(schema["pattern"])
        elif schema.get("format") in FORMATS:
            text = self._rng.choice(FORMATS[schema["format"]])
        else:
            text = self._rng.choice(WORDS)
        least, most = schema.get("minLength") or 0, schema.get("maxLength")
        if len(text) < least and "format" not in schema:
            text += self._rng.choice("abcé") * (least - len(text))
        return text[:most] if most is not None else text

    def _integer(self, schema: dict[str, Any], depth: int) -> int:
        step = schema.get("multipleOf") or 1
        low, high = _bounds(schema, 1)
        if low is None:
            low = -5 if high is None else high - 100
        high = low + 100 if high is None else high
        number = self._rng.choice([low, high, self._rng.randint(int(low), max(int(low), int(high)))])
        return int(number // step * step)

    def _number(self, schema: dict[str, Any], depth: int) -> float:
        if self._rng.random() < 0.5 or "multipleOf" in schema:
            return self._integer(schema, depth)
        low, high = _bounds(schema, 0.25)
        low = (-5 if high is None else high - 10) if low is None else low
        high = low + 10 if high is None else high
        return round(self._rng.uniform(low, high), 3)

    def _boolean(self, schema: dict[str, Any], depth: int) -> bool:
        return self._rng.random() < 0.5

    def _null(self, schema: dict[str, Any], depth: int) -> None:
        return None

    def _matching(self, pattern: str) -> str:
        """Returns a text that a pattern matches, if it can be told how; otherwise some text."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
            except (re.error, OverflowError):
                return "a"
        return "".join(self._pieces(parsed))

    def _pieces(self, parsed: Any) -> Iterator[str]:
        for kind, arg in parsed:
            name = str(kind).lower()
            if name == "literal":
                yield chr(arg)
            elif name == "not_literal":
                yield "b" if arg == ord("a") else "a"
            elif name == "any":
                yield self._rng.choice("aZ0 _")
            elif name == "in":
                yield self._of_class(arg)
            elif name == "branch":
                yield from self._pieces(self._rng.choice(arg[1]))
            elif name == "subpattern":
                yield from self._pieces(arg[-1])
            elif "repeat" in name:
                for _ in range(self._rng.randint(arg[0], min(arg[1], arg[0] + 3))):
                    yield from self._pieces(arg[2])

    def _of_class(self, parts: Any) -> str:
        chars = "abcxyzABCXYZ0123456789 _-./:@$#+*!?,;=()[]{}<>~%&'\"\\|^`\n\té"
        text = re.compile(_class_text(parts), re.ASCII)
        fitting = [char for char in chars if text.fullmatch(char)]
        return self._rng.choice(fitting) if fitting else "a"


def _class_text(parts: Any) -> str:
    """Returns a parsed class as text again."""
    named = {"digit": r"\d", "space": r"\s", "word": r"\w"}
    named |= {f"not_{name}": text.upper() for name, text in list(named.items())}
    body, negated = "", ""
    for kind, arg in parts:
        name = str(kind).lower()
        if name == "negate":
            negated = "^"
        elif name == "literal":
            body += re.escape(chr(arg))
        elif name == "range":
            body += f"{re.escape(chr(arg[0]))}-{re.escape(chr(arg[1]))}"
        elif name == "category":
            body += named[str(arg).lower().removeprefix("category_")]
    return f"[{negated}{body}]"


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema of what both ask for, as far as their values can be told apart."""
    found = dict(one)
    for key, value in other.items():
        if key not in found:
            found[key] = value
        elif key in ("properties", "patternProperties"):
            found[key] = {**found[key], **{k: _merged(found[key].get(k), v) for k, v in value.items()}}
        elif key == "required":
            found[key] = [*found[key], *(name for name in value if name not in found[key])]
        elif key in ("allOf",):
            found[key] = [*found[key], *value]
        elif key in ("anyOf", "oneOf", "$ref"):
            found["allOf"] = [*found.get("allOf", []), {key: value}]
        elif key == "enum":
            found[key] = [each for each in found[key] if each in value] or value
        elif key in ("type", "const", "pattern", "format", "additionalProperties", "items"):
            found[key] = value if found[key] is not False else False
    return found


def _merged(one: Any, other: Any) -> Any:
    return _both(one, other) if isinstance(one, dict) and isinstance(other, dict) else other


def _bounds(schema: dict[str, Any], step: float) -> tuple[Any, Any]:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if above is True or (above is not None and above is not False):
        low = (low if above is True else above) + step
    if below is True or (below is not None and below is not False):
        high = (high if below is True else below) - step
    return low, high


def _changed(value: Any, rng: random.Random) -> Any:
    """Returns a value with one change at one place."""
    places: list[tuple[Any, Any]] = [(None, None)]
    waiting = [value]
    while waiting:
        held = waiting.pop()
        pairs = held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ()
        for key, item in list(pairs):
            places.append((held, key))
            waiting.append(item)
    holder, key = rng.choice(places)
    if holder is None:
        return _other(value, rng)
    if isinstance(holder, dict) and rng.random() < 0.3:
        del holder[key]
    else:
        holder[key] = _other(holder[key], rng)
    return value


def _other(value: Any, rng: random.Random) -> Any:
    anything = [None, True, "", "zz top", -1, 10**9, 0.5, [], {}, ["a"], {"a": 1}]
    if isinstance(value, bool) or value is None:
        return rng.choice(anything)
    if isinstance(value, str):
        near = [value + "é", value[:-1], value.swapcase(), value * 40, value + " ", "\n" + value, f'"{value}']
        return rng.choice([*near, *anything])
    if isinstance(value, int | float):
        return rng.choice([value + 1, value - 1, value + 0.5, -value, value * 1000, str(value), *anything])
    if isinstance(value, list):
        return rng.choice([value[1:], [*value, *value], [*value, None], *anything])
    return rng.choice([{**value, "zz": None}, dict(list(value.items())[1:]), *anything])
