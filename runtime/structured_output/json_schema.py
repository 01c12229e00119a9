"""A JSON schema in keywords that llguidance enforces as they are meant, with the same instances or fewer."""

from collections.abc import Mapping
from typing import Any

from ...common.errors import RequestError, shown
from ...common.patterns import shared_steps
from .conditions import CONDITIONS, HANGS_ON_IF, without_conditions
from .lookarounds import without_lookarounds
from .one_of import exclusive
from .open_names import closed
from .patterns import quotable
from .string_formats import with_known_format
from .whole_schema import DEEPEST, DRAFT, LATER_DRAFT, NAMED, Whole, with_targets_apart

MAX_PATTERNS = 64  # of names in one object, as each is held against all others
MAX_PATTERN = 10_000  # characters of a pattern; of several, the root of the sum of their squares
MAX_HELD = 5000  # lists and objects that an enum has
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)
ONE = (  # keywords with a schema
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames"),
    *("then", "unevaluatedItems", "unevaluatedProperties"),
)
DEFINITIONS = ("$defs", "definitions")
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")  # with a list of them


@shared_steps()
def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema whose every instance is one of the given schema's, without what says nothing.

    What no other keyword says is left as it is, and refused where the grammar is made. Raises RequestError
    for a least number of properties that one name, written twice, would come up to.
    """
    schema = with_targets_apart(schema, (*CONDITIONS, *HANGS_ON_IF))
    found: dict[str, Any] = _enforceable(schema, Whole(schema), 0)
    return found


def _weigh(pattern: Any, root: Whole) -> None:
    """Raises RequestError for patterns that would take long to compile, which they do by their squares."""
    root.weight += len(pattern) ** 2 if isinstance(pattern, str) else 0
    if root.weight > MAX_PATTERN**2:
        raise RequestError(
            f"structured_outputs cannot be enforced: patterns are too long, the last of {len(pattern)} "
            f"characters; wanted at most {MAX_PATTERN}"
        )


def _enforceable(schema: Any, root: Whole, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return schema
    _weigh(schema.get("pattern"), root)
    alone = _without_what_says_nothing(schema, root)
    apart = exclusive(without_lookarounds(without_conditions(alone, root)), root)
    found = {key: _inside(key, value, root, depth + 1) for key, value in apart.items()}
    _name_draft(found)
    _drop_unique_items(found)
    _check_num_properties(found)
    _check_size(found)
    return _with_quotable_patterns(closed(with_known_format(found)))


def _inside(key: str, value: Any, root: Whole, depth: int) -> Any:
    if key in ONE and isinstance(value, Mapping):
        return _enforceable(value, root, depth)
    if key in LISTS and isinstance(value, list):
        return [_enforceable(each, root, depth) for each in value]
    if key in NAMED and isinstance(value, Mapping):
        return {name: _enforceable(each, root, depth) for name, each in value.items()}
    return value


def _check_size(schema: Mapping[str, Any]) -> None:
    """Raises RequestError for what would take long to compile."""
    patterns, values = schema.get("patternProperties"), schema.get("enum")
    num_patterns = len(patterns) if isinstance(patterns, Mapping) else 0
    num_held = sum(isinstance(value, list | dict) for value in values) if isinstance(values, list) else 0
    for name, num, most in (("patternProperties", num_patterns, MAX_PATTERNS), ("enum", num_held, MAX_HELD)):
        if num > most:
            what = "patterns" if name != "enum" else "lists and objects"
            raise RequestError(
                f"structured_outputs cannot be enforced: {name} holds {num} {what}; wanted at most {most}"
            )


def _with_quotable_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    pattern, named = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        schema = {**schema, "pattern": quotable(pattern)}
    if isinstance(named, Mapping):
        schema = {**schema, "patternProperties": {quotable(key): value for key, value in named.items()}}
    return schema


def _name_draft(schema: dict[str, Any]) -> None:
    """Names the draft as those who read it know it; without a number, and of others, it is the latest."""
    named = schema.get("$schema")
    if isinstance(named, str) and not LATER_DRAFT.match(named):
        draft = DRAFT.match(named)
        del schema["$schema"]
        if draft and draft[1]:
            schema["$schema"] = f"http://json-schema.org/{draft[1]}/schema#"


def _without_what_says_nothing(schema: Mapping[str, Any], root: Whole) -> dict[str, Any]:
    """Returns a schema without annotations beside a reference; in early drafts nothing counts beside it."""
    if not isinstance(schema.get("$ref"), str):
        return dict(schema)
    kept = (*DEFINITIONS, "$schema", "$id", "id", "$ref")
    return {
        key: value
        for key, value in schema.items()
        if key in kept or not (root.is_early or key in ANNOTATIONS or key.startswith("x-"))
    }


def _drop_unique_items(schema: dict[str, Any]) -> None:
    """Drops the keyword where it says nothing: false, or of one item at most."""
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (
        schema.get("uniqueItems") is True and isinstance(most, int) and most <= 1
    ):
        del schema["uniqueItems"]


def _check_num_properties(schema: Mapping[str, Any]) -> None:
    """Raises RequestError for a least number of properties to which one name, written twice, would count."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(required)) if isinstance(required, list) else 0
    if isinstance(least, int) and least > num_required + 1:
        raise RequestError(
            f"structured_outputs cannot be enforced: minProperties is {shown(least)}, and {num_required} are "
            f"required; wanted at most one more than required"
        )
