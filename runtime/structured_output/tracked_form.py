"""Forms with unique items: marked in the text of their grammar, which is taken apart where it is compiled."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...common.errors import RequestError, shown
from .item_tracker import ItemTracker
from .schema_places import Places
from .whole_schema import DEEPEST, NAMED, Whole

TRACKED = "tracked"  # the key of a grammar that holds what goes before the form
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class TrackedForm(NamedTuple):
    """A grammar without uniqueItems, and what is to be followed beside it."""

    grammar: str
    schema: dict[str, Any]
    after: bytes | None
    begun_by: bytes | None

    def tracker(self) -> ItemTracker:
        return ItemTracker(Places(self.schema).first, after=self.after, begun_by=self.begun_by)


def tracked_form(grammar: str) -> TrackedForm | None:
    """Returns the parts of a grammar that is marked as tracked; None for others."""
    whole = json.loads(grammar) if grammar.startswith("{") else {}
    if TRACKED not in whole:
        return None
    after, begun_by = whole.pop(TRACKED)
    own = whole["grammars"][-1]
    schema, own["json_schema"] = own["json_schema"], _without_unique_items(own["json_schema"])
    return TrackedForm(json.dumps(whole), schema, *(text and text.encode() for text in (after, begun_by)))


def marked(grammar: str, *, after: str | None = None, begun_by: str | None = None) -> str:
    """Returns a grammar by which uniqueItems of its schema, the last of its parts, are to be followed."""
    return json.dumps({**json.loads(grammar), TRACKED: [after, begun_by]})


def has_unique_items(schema: Any) -> bool:
    """Whether uniqueItems is true anywhere in a schema."""
    return any(key == "uniqueItems" and value is True for key, value in _keywords(schema, 0))


def check_trackable(schema: Mapping[str, Any]) -> None:
    """Raises RequestError for a schema in which it cannot be told which lists have unique items."""
    root = Whole(schema)
    refs = [(key, value) for key, value in _keywords(schema, 0) if key in REFERENCES]
    unsaid = [(key, value) for key, value in refs if key != "$ref" or root.resolved(value) is None]
    if refs:
        inner = [pair for pair in _keywords(schema, -1) if pair[0] in ("$id", "id")]
        unsaid += [(key, value) for key, value in inner if isinstance(value, str)]
    for key, value in unsaid[:1]:
        raise RequestError(
            f"structured_outputs cannot be enforced: uniqueItems in a schema with {key} {shown(value)}; "
            f"wanted references of the form #/$defs/name"
        )


def _keywords(schema: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yields the keywords of a schema and those in it; depth -1: but not those of the whole."""
    if isinstance(schema, list):
        for each in schema:
            yield from _keywords(each, depth + 1)
    for key, value in schema.items() if isinstance(schema, Mapping) and depth < DEEPEST else ():
        if depth >= 0:
            yield key, value
        if key in NAMED and isinstance(value, Mapping):
            yield from _keywords([*value.values()], depth + 1)
        elif key not in ("const", "enum"):
            yield from _keywords(value, depth + 1)


def _without_unique_items(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_unique_items(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if key != "uniqueItems" or value is not True}
    for key, value in found.items():
        if key in NAMED and isinstance(value, dict):
            found[key] = {name: _without_unique_items(own) for name, own in value.items()}
        elif key not in ("const", "enum"):
            found[key] = _without_unique_items(value)
    return found
