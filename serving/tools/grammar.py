"""Calls of tools as a grammar: what required and named calls are held to, in the model's own form."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.errors import RequestError
from ...runtime.structured_output.json_schema import enforceable
from .formats import Written

GUIDANCE = {  # JSON as templates write it
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
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
    special_tokens: Mapping[int, str],
    *,
    is_single: bool,
    otherwise: Mapping[str, Any] | None = None,
) -> str:
    """Returns a grammar in Lark's notation of one call or more, is_single: of exactly one.

    special_tokens: of the tokenizer, by id; a marker that is one is written as that token. otherwise: a JSON
    schema, of which the answer may be an instance in place of calls. Raises UnwritableError.
    """
    rules = _Rules(special_tokens)
    calls = [_call(rules, number, tool, written) for number, tool in enumerate(tools)]
    more = ""
    if not is_single and written.between is not None:
        more = f" ({rules.text(written.between)} call)*"
    whole = f"{rules.text(written.begin)} call{more} {rules.text(written.end)}"
    start = whole
    if otherwise is not None:
        rules.add("form", f"%json {json.dumps(otherwise)}")
        start = f"({whole}) | form"
    return "\n".join([f"start: {start}", f"call: {' | '.join(calls)}", *rules.lines])


class _Rules:
    """The rules of a grammar, as they are found."""

    def __init__(self, special_tokens: Mapping[int, str]) -> None:
        self.lines: list[str] = []
        self._special = {text: token_id for token_id, text in special_tokens.items() if text}

    def add(self, name: str, body: str) -> str:
        """Adds a rule and returns its name."""
        self.lines.append(f"{name}: {body}")
        return name

    def text(self, text: str) -> str:
        """Returns a text as a grammar has it, special tokens by their ids."""
        pieces = [text]
        for special in sorted(self._special, key=len, reverse=True):
            if special in text:
                pieces = [part for piece in pieces for part in _split(piece, special)]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )


def _split(piece: str, special: str) -> list[str]:
    """Returns the pieces around a text and itself between them."""
    first, *rest = piece.split(special)
    return [first, *(part for each in rest for part in (special, each))]


def _call(rules: _Rules, number: int, tool: OfferedTool, written: Written) -> str:
    before, after = written.around
    is_json = '"name"' in before
    name = json.dumps(tool.name, ensure_ascii=False) if is_json else tool.name
    schema = object_schema(tool.parameters)
    if written.is_python:
        arguments = _keywords(rules, number, schema)
    else:
        arguments = rules.add(f"a{number}", _json(schema))
    head, tail = rules.text(before.replace("{name}", name)), rules.text(after)
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
