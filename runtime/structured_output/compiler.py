"""Grammars compiled for a tokenizer, each once."""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

from ...common.errors import RequestError, UnsupportedError, clipped
from ...common.extras import require
from ...common.structural_tokens import NO_TOKENS, StructuralTokens
from .deep_stack import call_deep
from .grammar import PACKAGE
from .special_tokens import MARK, by_ids, renamed
from .token_bytes import TokenBytes
from .tracked_form import tracked_form
from .unique_items import UniqueItemsMatcher

MAX_KEPT = 256  # grammars, the last used
MAX_SHOWN = 500  # characters of what llguidance says
FUEL, FUEL_OF_SCHEMAS = 50_000, 300_000  # of expressions at first: a long one takes time by its square
ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
OURS = "a value may be an instance of two ways of a oneOf; wanted anyOf in its place, or lenient"


class GrammarCompiler:
    """Compiles grammars for one vocabulary; any thread may ask, and none waits for another's grammar.

    llguidance bounds the work itself: a grammar that would take long is refused.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        *,
        num_valid_ids: int,
        eos_token_ids: Sequence[int],
        structural_tokens: Callable[[], StructuralTokens] = lambda: NO_TOKENS,
    ) -> None:
        """tokenizer_json: returns the tokenizer as tokenizer.json has it; the first grammar asks for it.

        structural_tokens: returns those of the tokenizer, likewise.
        """
        self._structural_tokens = structural_tokens
        self._tokenizer_json = tokenizer_json
        self._num_valid_ids = num_valid_ids
        self._eos_token_ids = sorted(id_ for id_ in eos_token_ids if id_ < num_valid_ids)
        self._tokenizer: Any = None
        self._special_ids: dict[str, int] = {}  # once the tokenizer is made
        self._token_bytes: TokenBytes | None = None  # once a form has unique items
        self._compiled: dict[tuple[str, int], Any] = {}  # by grammar and lexer, the last used at the end
        self._beginning = threading.Lock()  # held while the tokenizer is made

    @cached_property
    def structural_tokens(self) -> StructuralTokens:
        """Those of the tokenizer that the model has logits for, by which grammars are written."""
        return self._structural_tokens().below(self._num_valid_ids)

    def matcher(self, grammar: str, lexer: int = 0) -> Any:
        """Returns a new matcher, at the beginning of an answer; RequestError for what cannot be enforced.

        lexer: which of a grammar's. Matchers of one have its states together behind a lock, so that what one
        has seen is quick for all; matchers of several can make masks at the same time.
        """
        return self.compiled(grammar, lexer).deep_copy()

    def compiled(self, grammar: str, lexer: int = 0) -> Any:
        """Returns the matcher that others are copies of, which nobody moves; errors as matcher()."""
        key = grammar, lexer
        compiled = self._compiled.pop(
            key, None
        )  # each such step is atomic: an interrupt would leave a lock held
        if compiled is None:  # by several threads at once, rather than that one waits for others' grammars
            compiled = call_deep(partial(self._compile, grammar))  # it recurses by references and rules
        self._compiled[key] = compiled
        while len(self._compiled) > MAX_KEPT:
            with suppress(RuntimeError, StopIteration):  # where another thread has just changed them
                self._compiled.pop(next(iter(self._compiled)), None)
        return compiled

    def warnings(self, grammar: str) -> list[str]:
        """Returns what a grammar leaves out of what was asked for, in words."""
        return [clipped(str(each), MAX_SHOWN) for each in self.matcher(grammar).get_grammar_warnings()]

    def _compile(self, grammar: str) -> Any:
        llguidance = require(PACKAGE, extra="structured")
        limits = llguidance.LLParserLimits(initial_lexer_fuel=_fuel(grammar))
        tracked = tracked_form(grammar)
        plain, tokenizer = tracked.grammar if tracked else grammar, self._own_tokenizer(llguidance)
        named = by_ids(plain, self._special_ids)
        matcher = llguidance.LLMatcher(tokenizer, named, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some grammars are found wrong by their first mask alone
        if matcher.is_error():
            raise RequestError(f"structured_outputs cannot be enforced: {error_of(matcher)}")
        if tracked is None:
            return matcher
        return UniqueItemsMatcher(matcher, self._own_token_bytes(tokenizer), tracked.tracker())

    def _own_token_bytes(self, tokenizer: Any) -> TokenBytes:
        with self._beginning:
            if self._token_bytes is None:
                self._token_bytes = TokenBytes(tokenizer, self._special_ids)
            return self._token_bytes

    def _own_tokenizer(self, llguidance: Any) -> Any:
        with self._beginning:
            if self._tokenizer is None:
                text, self._special_ids = renamed(self._tokenizer_json(), self._num_valid_ids)
                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        text, n_vocab=self._num_valid_ids, eos_token=self._eos_token_ids
                    )
                except ValueError as error:
                    why = clipped(str(error), MAX_SHOWN)
                    raise UnsupportedError(
                        f"structured_outputs needs a tokenizer that llguidance reads: {why}"
                    ) from error
            return self._tokenizer


def _fuel(grammar: str) -> int:
    """Returns what the expressions of a grammar may take at first."""
    held = json.loads(grammar)["grammars"] if grammar.startswith("{") else ()
    has_schema = "%json" in grammar or any(each.get("json_schema") is not None for each in held)
    return FUEL_OF_SCHEMAS if has_schema else FUEL


def error_of(matcher: Any) -> str:
    """Returns what a matcher says is wrong, without the state of its parser that follows."""
    said = str(matcher.get_error()).partition("\n<state>")[0].partition("\n<backtrace>")[0].strip()
    return clipped(said.replace(ONE_OF, OURS).replace(MARK, ""), MAX_SHOWN)
