"""What form an answer is to have: a JSON schema, a regular expression, one of some texts, a grammar."""

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.errors import RequestError, UnknownParameterError, shown
from ..common.names import refuse_unknown
from .validation import check_flag, check_unicode, items, text

MAX_FORM = 2**20  # characters of a schema, expression, grammar, or of all choices
MAX_CHOICES = 10_000
KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of forms, as vLLM names them


def kinds_in(given: object) -> dict[str, Any]:
    """Returns the kinds that somebody else's object of these names sets: those that are not None."""
    return {name: value for name in KINDS if (value := getattr(given, name)) is not None}


@refuse_unknown(UnknownParameterError, {})
@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """The form of an answer, one of the five; only tokens that keep to it are sampled.

    What of it cannot be enforced is refused when the request is made, never left out. Raises RequestError,
    naming the field, for what is no form at all.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, as a mapping or as its text; the answer is JSON that it accepts."""
    regex: str | None = None
    """A regular expression that matches the whole answer."""
    choice: Sequence[str] | None = None
    """Texts of which the answer is one."""
    grammar: str | None = None
    """A context-free grammar, in Lark's notation or in GBNF, which has ::= between a name and its rule."""
    json_object: bool = False
    """Whether the answer is any JSON object."""
    lenient: bool = False
    """Whether what a JSON schema asks for and cannot be enforced is left out, and said in a warning."""
    compact: bool = False
    """Whether JSON is written without blanks between its parts, in fewer tokens."""
    reasoning_end: str | None = None
    """A text or token, as </think>, up to which anything may be written before the form begins."""
    reasoning_begin: str | None = None
    """One, as <think>, without which there is no such part; otherwise there is, as the prompt began it."""

    def __post_init__(self) -> None:
        for name in ("json_object", "lenient", "compact"):
            check_flag(name, getattr(self, name))
        if self.json is not None:
            self._settle("json", _schema(self.json))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise RequestError(f"structured_outputs has {got}; wanted one of {', '.join(KINDS)}")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                self._settle(name, _form(name, getattr(self, name)))
        for name in ("reasoning_end", "reasoning_begin"):
            if getattr(self, name) is not None:
                self._settle(name, _form(name, getattr(self, name)))
        if self.reasoning_begin is not None and self.reasoning_end is None:
            raise RequestError("reasoning_begin is given alone; wanted reasoning_end with it, or by itself")
        if self.choice is not None:
            self._settle("choice", _choices(self.choice))

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # only while being built: a checked value in its stored form


def _form(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} is {shown(value)}; wanted a string")
    plain = str.__str__(value)  # before a subclass is asked anything
    if not 0 < len(plain) <= MAX_FORM:
        raise RequestError(f"{name} has {len(plain)} characters; wanted 1 to {MAX_FORM}")
    check_unicode(name, plain)
    return plain


def _schema(schema: Any) -> str:
    """Returns a schema as text; what it means is for the compiler of grammars to say."""
    if isinstance(schema, str):
        plain = _form("json", schema)
        try:
            schema = json_text.loads(plain)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json is {shown(plain)}, which is no JSON: {error}") from error
    if schema is False:
        raise RequestError("json is false, a schema that accepts nothing; wanted one that accepts something")
    if schema is True:
        schema = {}  # accepts anything, too, and has options
    if not isinstance(schema, Mapping):
        raise RequestError(f"json is {shown(schema)}; wanted a JSON schema, as a mapping or as its text")
    try:
        plain = json_text.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json is {shown(schema)}, which JSON cannot hold: {error}") from error
    return _form("json", plain)


def _choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str):
        raise RequestError(f"choice is {shown(choices)}; wanted a list of texts")
    plain = tuple(text("choice", each, verb="holds") for each in items("choice", choices, MAX_CHOICES))
    if not plain or not all(plain):
        raise RequestError(f"choice is {shown(choices)}; wanted texts that are not empty, one or more")
    if sum(map(len, plain)) > MAX_FORM:
        raise RequestError(f"choice has {sum(map(len, plain))} characters in all; wanted at most {MAX_FORM}")
    return plain
