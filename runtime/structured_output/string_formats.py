"""Formats of strings that llguidance does not know, as patterns."""

from collections.abc import Mapping
from typing import Any

_CODE = r"%[0-9A-Fa-f]{2}"
_URI = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|{_CODE})"
_IRI = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?\u00a0-\ud7ff\uf900-\ufdcf-]|{_CODE})"
PATTERNS = {
    "byte": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "iri": rf"^[A-Za-z][A-Za-z0-9+.-]*:{_IRI}*(?:#{_IRI}*)?$",
    "iri-reference": rf"^(?:[./?]{_IRI}*)?(?:#{_IRI}*)?$",
    "json-pointer": r"^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "uri-reference": rf"^(?:[./?]{_URI}*)?(?:#{_URI}*)?$",
}
OR_FORMATS = {"uri-reference": "uri"}  # that are instances as well
SAYS_NOTHING = frozenset(
    ("binary", "password", "int32", "int64", "float", "double")
)  # of strings, in OpenAPI


def with_known_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with a pattern in place of a format that llguidance does not know, and we do."""
    name = schema.get("format")
    if not isinstance(name, str) or (name not in PATTERNS and name not in SAYS_NOTHING):
        return schema
    found = {key: value for key, value in schema.items() if key != "format"}
    if name in SAYS_NOTHING:
        return found
    if name in OR_FORMATS:
        own: dict[str, Any] = {"anyOf": [{"format": OR_FORMATS[name]}, {"pattern": PATTERNS[name]}]}
    else:
        own = {"pattern": PATTERNS[name]}
    if found.keys().isdisjoint(own):
        return {**found, **own}
    others = found.get("allOf")
    held: list[Mapping[str, Any]] = others if isinstance(others, list) else []
    return {**found, "allOf": [*held, own]}
