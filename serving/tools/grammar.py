"""Calls of tools as a grammar: what required and named calls are held to, in the model's own form."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.errors import RequestError
from ...common.structural_tokens import StructuralTokens
from ...runtime.structured_output.json_schema import enforceable
from ...runtime.structured_output.special_tokens import in_lark
from .formats import Written

GUIDANCE = {  # JSON as templates write it
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
NAME = "{name}"  # where the name of a tool stands in how calls are written
PLAIN_KEYS = {"type", "properties", "required", "title", "description", "$schema", "$defs", "definitions"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedTool:
    """A tool, as far as its calls are held to a form."""

    name: str
    parameters: Mapping[str, Any] | None  # a JSON schema of an object; None: there are none


class UnwritableError(ValueError):
    """A schema that this form of calls cannot hold."""


def calls_grammar(
    tools: Sequence[OfferedTool],
    written: Written,
    tokens: StructuralTokens,
    *,
    is_single: bool,
    otherwise: Mapping[str, Any] | None = None,
) -> str:
    """Returns a grammar in Lark's notation of one call or more, is_single: of exactly one.

    tokens: of the tokenizer; a marker that is one is written as that token. otherwise: a JSON schema, of
    which the answer may be an instance in place of calls. Raises UnwritableError.
    """
    rules = _Rules(tokens)
    calls = [_call(rules, number, tool, written) for number, tool in enumerate(tools)]
    more = ""
    if not is_single and written.between is not None:
        more = f" ({rules.text(written.between)} call)*"
    ways = [rules.add("calls", f"{rules.text(written.begin)} call{more} {rules.text(written.end)}")]
    opener, closer = written.maybe_around
    if opener in tokens.ids and (not closer or closer in tokens.ids):
        ways.append(f"{rules.text(opener)} calls {rules.text(closer)}")
    if otherwise is not None:
        ways.append(rules.add("form", f"%json {json.dumps(otherwise)}"))
    return "\n".join([f"start: {' | '.join(ways)}", f"call: {' | '.join(calls)}", *rules.lines])


class _Rules:
    """The rules of a grammar, as they are found."""

    def __init__(self, tokens: StructuralTokens) -> None:
        self.lines: list[str] = []
        self._tokens = tokens

    def add(self, name: str, body: str) -> str:
        """Adds a rule and returns its name."""
        self.lines.append(f"{name}: {body}")
        return name

    def text(self, text: str, name: str = "") -> str:
        """Returns a text as a grammar has it, structural tokens by their ids, a tool's name in its place."""
        pieces = self._tokens.pieces(text)
        return in_lark(each if isinstance(each, int) else each.replace(NAME, name) for each in pieces)


def _call(rules: _Rules, number: int, tool: OfferedTool, written: Written) -> str:
    before, after = written.around
    is_json = '"name"' in before
    name = json.dumps(tool.name, ensure_ascii=False) if is_json else tool.name
    schema = object_schema(tool.parameters)
    if written.is_python:
        arguments = _keywords(rules, number, schema)
    else:
        arguments = rules.add(f"a{number}", _json(schema))
    head, tail = rules.text(before, name), rules.text(after)
    return rules.add(f"c{number}", f"{head} {arguments} {tail}")


def object_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a schema of the same that accepts objects alone."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**parameters, "type": "object"}


def _json(schema: Mapping[str, Any]) -> str:
    """Returns a schema as a rule has it; UnwritableError for what is refused before a grammar is made."""
    try:
        held = enforceable(schema)
    except RequestError as error:
        raise UnwritableError(str(error)) from None
    return f"%json {json.dumps({**held, 'x-guidance': GUIDANCE})}"


def _keywords(rules: _Rules, number: int, schema: Mapping[str, Any]) -> str:
    """Returns the rule of key=value pairs, in the schema's order; those not required may be missing."""
    others = set(schema) - PLAIN_KEYS - {"additionalProperties"}
    if others or isinstance(schema.get("additionalProperties"), Mapping):
        raise UnwritableError(
            f"{min(others, default='additionalProperties')} has no place in key=value pairs"
        )
    properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
    if not required <= set(properties) or not all(name.isidentifier() for name in properties):
        raise UnwritableError("key=value pairs have the names of properties, each an identifier")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    first, later = '""', '""'
    for place, (name, own) in reversed([*enumerate(properties.items())]):
        own = own if isinstance(own, Mapping) else {}
        value = rules.add(f"v{number}_{place}", _json({**own, **shared}))
        pair = f"{json.dumps(f'{name}=')} {value}"
        skips = name not in required
        next_first = rules.add(f"f{number}_{place}", f"{pair} {later}" + (f" | {first}" if skips else ""))
        later = rules.add(f"l{number}_{place}", f'", " {pair} {later}' + (f" | {later}" if skips else ""))
        first = next_first
    return first
