r"""Names of properties that a schema does not list, held apart from those that it does.

llguidance lets such a name be written with escapes: as "\u0061" the name "a" would pass for another, and its
value for one that no schema constrains. Names that match a pattern are written without; such names get one.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from ...common.patterns import searches

MAX_NAMES = 50_000  # characters in all of names to hold others apart from
MAX_NAME = 80  # and of one, as each character nests the pattern once
BEGINNING = re.compile(r"\^((?:[A-Za-z0-9_@/ -]|\\[-./$@])+)(?:\.\*\$?|\.\+\$?)?")
OF_CLASS = re.compile(r"\^(?:\[(?!\^)((?:[A-Za-z0-9_@./ $:-]|\\[-./wd])+)\]|(\\w))[+*]\$")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns an object's schema by which names beside the listed ones match a pattern of their own.

    Where no pattern of such names is found, its instances have none. Other schemas come back as they are.
    """
    others = schema.get("additionalProperties", True)
    listed, patterns = schema.get("properties"), schema.get("patternProperties")
    listed = listed if isinstance(listed, Mapping) else {}
    patterns = patterns if isinstance(patterns, Mapping) else {}
    required = schema.get("required")
    required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    if others is False or not (listed or patterns or required):
        return schema
    own = _pattern_of_others(others, {*listed, *required}, patterns)
    found = {**schema, "additionalProperties": False}
    if own is not None:
        return {**found, "patternProperties": {**patterns, own: others}}
    missing = [name for name in required if name not in listed and not _matches(name, patterns)]
    return {**found, "properties": {**listed, **dict.fromkeys(missing, others)}} if missing else found


def _pattern_of_others(others: Any, names: Collection[str], patterns: Mapping[str, Any]) -> str | None:
    """Returns a pattern of names that are none of these and match none of these; None where none is known."""
    says_nothing = others is True or (isinstance(others, Mapping) and not others)
    if not patterns:
        return "" if says_nothing else without(names, ())
    if says_nothing:
        names = ()
    beginnings = [BEGINNING.fullmatch(pattern) for pattern in patterns]
    if all(beginnings):
        return without(names, [re.sub(r"\\(.)", r"\1", found[1]) for found in beginnings if found])
    (pattern, *more) = patterns
    of_class = None if more else OF_CLASS.fullmatch(pattern)
    if of_class is not None and not names:
        return f"[^{of_class[1] or of_class[2]}]"
    return None


def _matches(name: str, patterns: Mapping[str, Any]) -> bool:
    try:
        return any(searches(pattern, name) for pattern in patterns)
    except re.error:  # who enforces the whole decides
        return True


def without(names: Collection[str], beginnings: Collection[str]) -> str | None:
    """Returns a pattern of all texts that are none of the names and begin with none of the beginnings.

    None where it would be too large.
    """
    if sum(map(len, names)) > MAX_NAMES or max(map(len, [*names, *beginnings]), default=0) > MAX_NAME:
        return None
    tree: dict[str, Any] = {}
    for text, end in [*((name, "name") for name in names), *((each, "beginning") for each in beginnings)]:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[end] = {}
    return f"^(?:{_without(tree)})$"


def _without(node: Mapping[str, Any]) -> str:
    """Returns the alternatives of what may follow at a place in the tree of what is left out."""
    if "beginning" in node:
        return r"[^\s\S]"
    chars = sorted(key for key in node if len(key) == 1)
    ways = [] if "name" in node else [""]
    ways.append(rf"[^{''.join(map(escaped, chars))}][\s\S]*" if chars else r"[\s\S]+")
    ways += [f"{escaped(char)}(?:{_without(node[char])})" for char in chars if "beginning" not in node[char]]
    return "|".join(ways)


def escaped(char: str) -> str:
    return f"\\{char}" if char in r"\.+*?()|[]{}^$-&~#/" else char
