"""The form of an answer as a grammar of llguidance, which is text."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ...common.errors import RequestError
from ...common.extras import require
from ...common.structural_tokens import NO_TOKENS, StructuralTokens
from ..structured_outputs import StructuredOutputs
from .json_schema import enforceable
from .special_tokens import in_lark, quoted
from .tracked_form import check_trackable, has_unique_items, marked, tracked_form

PACKAGE = "llguidance"
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


@lru_cache(maxsize=32)
def grammar_of(form: StructuredOutputs, tokens: StructuralTokens = NO_TOKENS) -> str:
    """Returns the grammar of a form; the same form has the same text, written once for many prompts.

    tokens: of the tokenizer; where reasoning begins or ends with one, that token is meant and no text.
    RequestError for GBNF and JSON that cannot be read. Whether it can be enforced is said by compiling it.
    """
    grammar = _grammar(form)
    return grammar if form.reasoning_end is None else _after_reasoning(grammar, form, tokens)


def _after_reasoning(grammar: str, form: StructuredOutputs, tokens: StructuralTokens) -> str:
    """Returns a grammar of reasoning and what follows it, which is the other grammar."""
    held = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    reasoning = "reasoning BLANKS"
    if form.reasoning_begin is not None:
        reasoning = f"({in_lark(tokens.pieces(form.reasoning_begin))} {reasoning})?"
    rules = (
        f"start: {reasoning} @form",
        *_reasoning(form.reasoning_end or "", tokens),
        "BLANKS: /[ \\n]{0,3}/",
    )
    first, *others = held
    whole = [{"lark_grammar": "\n".join(rules)}, {**first, "name": "form"}, *others]
    found = json.dumps({"grammars": whole})
    if tracked_form(grammar) is None:
        return found
    return marked(found, after=form.reasoning_end, begun_by=form.reasoning_begin)


def _reasoning(end: str, tokens: StructuralTokens) -> tuple[str, ...]:
    """Returns the rules of any text up to its end; one that has a token is not written as text before it.

    So whoever reads the text, and not its tokens, finds the same end.
    """
    pieces = tokens.pieces(end)
    name = next((tokens.names[piece] for piece in pieces if isinstance(piece, int)), None)
    if name is None:
        return (f"reasoning[suffix={quoted(end)}]: /(.|\\n)*/",)
    before, _, behind = end.partition(name)
    return (
        f"reasoning: REASONING {in_lark(tokens.pieces(name + behind))}",
        "REASONING: BEGUN & ~ENDED",
        f"BEGUN: ANY {quoted(before)}" if before else "BEGUN: ANY",
        f"ENDED: ANY {quoted(name)} ANY",
        "ANY: /(.|\\n)*/",
    )


def _grammar(form: StructuredOutputs) -> str:
    matcher = require(PACKAGE, extra="structured").LLMatcher
    if form.regex is not None:
        return str(matcher.grammar_from_regex(form.regex))
    if form.choice is not None:
        return str(matcher.grammar_from_lark(f"start: {' | '.join(map(quoted, form.choice))}"))
    if form.grammar is not None:
        return str(matcher.grammar_from_lark(_lark(form.grammar)))
    schema = {"type": "object"} if form.json_object else _schema_of(form)
    settings = {
        "coerce_one_of": form.lenient,
        "lenient": form.lenient,
        "whitespace_flexible": not form.compact,
    }
    try:
        grammar = str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=settings))
    except ValueError as error:  # as of one that is nested too deeply
        raise RequestError(f"structured_outputs.json cannot be read: {error}") from error
    return marked(grammar) if _is_tracked(schema, form) else grammar


def _is_tracked(schema: Mapping[str, Any], form: StructuredOutputs) -> bool:
    """Whether unique items are followed; RequestError for those that cannot be, unless lenient."""
    if not has_unique_items(schema):
        return False
    try:
        check_trackable(schema)
    except RequestError:
        if form.lenient:
            return False
        raise
    return True


def _schema_of(form: StructuredOutputs) -> dict[str, Any]:
    try:
        return enforceable(json.loads(str(form.json)))
    except RecursionError as error:
        raise RequestError("structured_outputs.json is nested too deeply") from error


def _lark(grammar: str) -> str:
    if not GBNF_RULE.search(grammar):
        return grammar
    try:
        return str(require(f"{PACKAGE}.gbnf_to_lark", extra="structured").any_to_lark(grammar))
    except Exception as error:  # its parser raises whatever it meets
        raise RequestError(f"structured_outputs.grammar is GBNF that cannot be read: {error}") from error
