"""What is known of a schema as a whole, as its parts are written otherwise."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

DEEPEST = 128  # of a schema, as llguidance has it too
MAX_WORK = 100_000  # parts that are looked at in one schema
NAMED = (  # keywords with names of schemas
    *("$defs", "definitions", "dependencies", "dependentSchemas"),
    *("patternProperties", "properties"),
)
DRAFT = re.compile(r"^https?://json-schema.org/(?:(draft-0[4-7])/)?schema#?$")
LATER_DRAFT = re.compile(r"^https?://json-schema.org/draft/20(?:19-09|20-12)/schema#?$")


class TooMuchError(Exception):
    """There is more to look at than is."""


class Whole:
    """A whole schema: its references, its draft, and how much of it may still be looked at."""

    def __init__(self, schema: Any) -> None:
        self._schema, self._left = schema, MAX_WORK
        self.weight = 0  # of the patterns that are seen
        own_id = schema.get("$id", schema.get("id")) if isinstance(schema, Mapping) else None
        self._own_id = own_id.removesuffix("#") if isinstance(own_id, str) else ""
        named = schema.get("$schema") if isinstance(schema, Mapping) else None
        draft = DRAFT.match(named) if isinstance(named, str) else None
        early = draft[1] if draft else None
        self.is_early = early is not None  # up to draft 7, where nothing counts beside a reference
        self.has_const = early != "draft-04"

    def look(self, num: int = 1) -> None:
        """Counts what is looked at."""
        self._left -= num
        if self._left < 0:
            raise TooMuchError

    def resolved(self, ref: Any) -> Any:
        """Returns what a reference within the schema stands for; None where that is not known."""
        found = self._schema
        pointer = ref.removeprefix(self._own_id) if isinstance(ref, str) else ""
        if not pointer.startswith("#"):
            return None
        for part in pointer[1:].strip("/").split("/") if pointer.strip("#/") else ():
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                return None
        return found


def with_targets_apart(schema: Mapping[str, Any], keys: Collection[str]) -> Mapping[str, Any]:
    """Returns a schema whose references go through none of these keys: they find it in $defs as well."""
    root = Whole(schema)
    names: dict[str, str] = {}
    targets: dict[str, Any] = {}
    for ref in sorted(set(_references(schema, 0))):
        if not set(keys).isdisjoint(ref.split("/")) and (target := root.resolved(ref)) is not None:
            names[ref] = f"#/$defs/moved-{len(targets)}"
            targets[f"moved-{len(targets)}"] = target
    if not names:
        return schema
    held = schema.get("$defs", {})
    found: Mapping[str, Any] = _referring({**schema, "$defs": {**held, **targets}}, names)
    return found


def _references(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, Mapping) and depth < DEEPEST:
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from _references(item, depth + 1)
    elif isinstance(value, list) and depth < DEEPEST:
        for item in value:
            yield from _references(item, depth + 1)


def _referring(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_referring(item, names) for item in value]
    if not isinstance(value, Mapping):
        return value
    found = {k: item if k in ("const", "enum") else _referring(item, names) for k, item in value.items()}
    if isinstance(value.get("$ref"), str):
        found["$ref"] = names.get(value["$ref"], value["$ref"])
    return found
