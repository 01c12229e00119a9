"""Sampling parameters: how tokens are chosen and where an answer ends, checked when they are given."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..common.errors import RequestError, UnknownParameterError, shown
from ..common.logging import get_logger, log_once
from ..common.names import refuse_unknown
from .other_names import SAMPLING
from .structured_outputs import StructuredOutputs
from .validation import LARGEST, MAX_TEXT, as_int, check_flag, integer, items, number, text, token_ids

if TYPE_CHECKING:
    from torch import Tensor

logger = get_logger("runtime")

SEED_LIMIT = 2**63  # seeds travel to the device as int64
# What one request may hold at most. Tables of a step are as wide as the widest request in it, so one without
# bounds would take the memory and the time of all others.
MAX_ANSWERS = 4096
MAX_STOPS = 4096  # strings or ids
MAX_BIASES = 16384
MAX_ALLOWED = 2**20  # a bit each on the device
MAX_BAD_WORDS = 1024
MAX_WORD_TOKENS = 64
MAX_PROCESSORS = 64
MODEL_DEFAULTS = {  # what a checkpoint's author may set, and what changes nothing
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
}

CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 0.9}  # of chats with a checkpoint that names no sampling
# (prompt token ids, output token ids so far, logits [vocab] float32) -> logits of the same shape
LogitsProcessor = Callable[[Sequence[int], Sequence[int], "Tensor"], "Tensor"]


class SamplingDefaults(Protocol):
    """A model's own sampling settings, used where a request leaves them open."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def typical_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...


@refuse_unknown(UnknownParameterError, SAMPLING)
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    None leaves a choice to the checkpoint's defaults where it has any, else to what changes nothing; chats
    have defaults of their own between the two (Runtime.chat_params). max_tokens is a ceiling: where the
    context ends sooner, so does the answer. docs/sampling.md has the order in which all of these apply.
    """

    n: int = 1
    """Answers to each prompt, drawn apart."""
    best_of: int | None = None
    """Answers to draw, of which the n with the highest mean log-probability are given."""
    logprobs: int | None = None
    """So many likeliest tokens are reported beside each token of the answer; 0 reports it alone."""
    prompt_logprobs: int | None = None
    """Likewise for each token of the prompt."""
    max_tokens: int | None = None
    """Tokens of the answer at most; otherwise until the model ends it or the context is full."""
    min_tokens: int = 0
    """Until so many tokens have come, ids that stop are not sampled and stop strings not looked for."""
    temperature: float | None = None
    """0 always takes the likeliest token; 1 draws as the model says."""
    top_k: int | None = None
    """Draw among the k likeliest tokens; 0 or -1 is off."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together reach this probability; 1 is off."""
    min_p: float | None = None
    """Drop tokens less likely than this times the likeliest; 0 is off."""
    typical_p: float | None = None
    """Draw among the tokens of the most typical information that together reach this probability; 1 is
    off."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the answer holds already, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off once for each time that the answer holds a token, -2 to 2."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens that prompt or answer hold; 1 is neutral."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to logits, by token id, -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """No other token is sampled."""
    bad_words: Sequence[str | Sequence[int]] | None = None
    """Texts, or token ids in Python, none of which the answer completes."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the answer has: a JSON schema, a regular expression, one of some texts, a grammar."""
    logits_processors: Sequence[LogitsProcessor] | None = None
    """Functions of prompt, answer and logits that give other logits; docs/sampling.md has the order."""
    seed: int | None = None
    """The same seed draws the same answer; otherwise each request draws apart."""
    stop: str | Sequence[str] | None = None
    """Texts that end the answer."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the answer."""
    ignore_eos: bool = False
    """Whether to go on where the model ends its answer."""
    include_stop_str_in_output: bool = False
    """Whether the text that ended the answer stays in it."""
    skip_special_tokens: bool = True
    """Whether tokens such as the end of a turn are left out of the text."""
    detokenize: bool | None = None
    """Whether there is text at all; otherwise wherever there is a tokenizer."""

    def __post_init__(self) -> None:
        settle = self._settle
        for name, (left, stored, check) in _CHECKS.items():
            value = getattr(self, name)
            if value is not left:
                settle(name, check(value))
            elif stored is not left:
                settle(name, stored)
        if self.best_of is not None:
            wanted = f"n ({self.n}) or more"
            settle("best_of", integer("best_of", self.best_of, wanted, low=self.n, high=MAX_ANSWERS))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower it"
            )

    @property
    def adjusts(self) -> bool:
        """Whether anything but temperature, top_k, top_p and min_p changes what is sampled."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty not in (None, 1.0)
            or self.typical_p not in (None, 1.0)
            or self.allowed_token_ids
            or self.logit_bias
            or self.bad_words
            or self.logits_processors
        )

    def resolve(self, defaults: SamplingDefaults | None, *, seed: int) -> "SamplingParams":
        """Returns these with nothing left open: the own value, else the model's default, else the neutral.

        seed: for a request that brings none, a signed 64-bit one.
        """

        chosen: dict[str, object] = {"seed": seed if self.seed is None else self.seed}
        for name, neutral in MODEL_DEFAULTS.items():
            if getattr(self, name) is None:
                model = getattr(defaults, name, None)
                chosen[name] = neutral if model is None else model
        return self._with(**chosen)

    def with_seed(self, seed: int) -> "SamplingParams":
        """Returns the same with another seed, a signed 64-bit one."""
        return self._with(seed=seed)

    def without_form(self) -> "SamplingParams":
        """Returns the same without structured_outputs, as what they come to goes beside these."""
        return self if self.structured_outputs is None else self._with(structured_outputs=None)

    def without_processors(self) -> "SamplingParams":
        """The same without code of the caller's, so as plain data."""
        return self._with(logits_processors=None) if self.logits_processors else self

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of any token are wanted."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    def _with(self, **checked: object) -> "SamplingParams":
        other = object.__new__(type(self))  # what was checked once needs no second time
        settle = other._settle
        for name in self.__slots__:
            settle(name, checked[name] if name in checked else getattr(self, name))
        return other

    @property
    def _settle(self) -> Callable[[str, object], None]:
        """Puts in a checked value in its stored form, only while this is being built."""
        return partial(object.__setattr__, self)


def for_chat(params: SamplingParams, defaults: SamplingDefaults | None) -> SamplingParams:
    """Returns the parameters of a chat: with CHAT_DEFAULTS for what they and the checkpoint leave open.

    defaults: the checkpoint's; with None, CHAT_DEFAULTS are left out, too.
    """
    if defaults is None or not isinstance(params, SamplingParams):
        return params
    named = {name for name in MODEL_DEFAULTS if getattr(defaults, name) is not None}
    left: dict[str, Any] = {
        name: value for name, value in CHAT_DEFAULTS.items() if getattr(params, name) is None
    }
    if named - {"repetition_penalty"} or not left:
        return params
    said = ", ".join(f"{name} {value}" for name, value in left.items())
    log_once(logger, logging.INFO, f"chats are sampled with {said}: the checkpoint does not say how")
    return params._with(**left)


def describe_defaults(defaults: SamplingDefaults) -> str:
    """Returns the settings that a checkpoint names, in words."""
    values = ((name, getattr(defaults, name)) for name in MODEL_DEFAULTS)
    return ", ".join(f"{name} {value}" for name, value in values if value is not None) or "none"


def stopping_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Returns the ids that end a request: the caller's own, and every EOS unless ignore_eos."""
    own = params.stop_token_ids or ()
    return frozenset(own if params.ignore_eos else (*own, *eos_token_ids))


def resolve_bad_words(params: SamplingParams, encode: Callable[[str], Sequence[int]]) -> SamplingParams:
    """Returns the parameters with bad words as token ids: of texts at the beginning of a word and within.

    RequestError for a text that the tokenizer has no tokens for, or too many.
    """
    if not any(isinstance(word, str) for word in params.bad_words or ()):
        return params
    words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words or ():
        found = (encode(word), encode(" " + word.lstrip())) if isinstance(word, str) else (word,)
        if not all(0 < len(ids) <= MAX_WORD_TOKENS for ids in found):
            got = f"bad_words holds {shown(word)}"
            wanted = f"wanted words that the tokenizer has tokens for, at most {MAX_WORD_TOKENS}"
            raise RequestError(f"{got}; {wanted}")
        words |= {tuple(ids): None for ids in found}
    return params._with(bad_words=_bad_words(tuple(words)))


def check_ids(params: SamplingParams, stop_token_ids: Iterable[int], num_ids: int) -> None:
    """Raises RequestError for ids that the model has not, and where no token is left to be sampled.

    Bad words are token ids here; num_ids: ids from there on are no tokens.
    """
    if not (params.stop_token_ids or params.min_tokens or params.adjusts):
        return
    words = tuple(word for word in params.bad_words or () if not isinstance(word, str))
    named: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or {},
        "bad_words": [id_ for word in words for id_ in word],
    }
    for name, ids in named.items():
        for id_ in ids:
            if id_ >= num_ids:
                raise RequestError(f"{name} holds {id_}; wanted ids of the vocabulary, 0 to {num_ids - 1}")
    excluded = {word[0] for word in words if len(word) == 1}
    allowed = params.allowed_token_ids or range(num_ids)
    if all(id_ in excluded for id_ in allowed):
        raise RequestError(
            f"bad_words holds {len(words)} words, and every token that is allowed is one of them"
        )
    excluded |= set(stop_token_ids)
    if params.min_tokens and all(id_ in excluded for id_ in allowed):
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but every token that is allowed stops; wanted another"
        )


def check_logprobs(params: SamplingParams, num_valid_ids: int) -> None:
    """Raises RequestError where more of the likeliest tokens are wanted than there are."""
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > num_valid_ids:
            raise RequestError(
                f"{name} is {wanted}; wanted at most {num_valid_ids}, the number of tokens that there are"
            )


def _stop_strings(stop: Any) -> tuple[str, ...]:
    wanted = "non-empty strings, or stop=None for none"
    found = [stop] if isinstance(stop, str) else items("stop", stop, MAX_STOPS)
    strings = tuple(text("stop", string, verb="holds", wanted=wanted) for string in found)
    if not all(strings):
        raise RequestError(f"stop holds ''; wanted {wanted}")
    _check_total("stop", strings)
    return strings


def _check_total(name: str, strings: Iterable[str]) -> None:
    total = sum(map(len, strings))
    if total > MAX_TEXT:
        raise RequestError(f"{name} holds {total} characters in all; wanted at most {MAX_TEXT}")


def _biases(biases: Any) -> dict[int, float]:
    """Returns biases by token id, an int or, as in JSON, a string of digits."""
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias is {shown(biases)}; wanted a mapping from token ids to numbers")
    plain: dict[int, float] = {}
    for key, value in items("logit_bias", biases.items(), MAX_BIASES):
        digits = isinstance(key, str) and len(key) <= len(str(LARGEST)) and key.isascii() and key.isdigit()
        id_ = int(key) if digits else as_int(key)
        if id_ is None or not 0 <= id_ <= LARGEST or id_ in plain:
            wanted = "a token id, 0 or more, and each once"
            raise RequestError(f"logit_bias holds the key {shown(key)}; wanted {wanted}")
        name = f"logit_bias[{shown(key)}]"
        bias = number(name, value, "-100 to 100", low=-100.0, high=100.0, optional=False)
        assert bias is not None
        plain[id_] = bias
    return dict(sorted(plain.items()))


def _bad_words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    plain: list[str | tuple[int, ...]] = []
    for word in items("bad_words", words, MAX_BAD_WORDS):
        if isinstance(word, str):
            plain.append(text("bad_words", word, verb="holds"))
        elif isinstance(word, Iterable) and not isinstance(word, (bytes, bytearray)):
            plain.append(token_ids(f"bad_words[{len(plain)}]", word, MAX_WORD_TOKENS))
        else:
            raise RequestError(f"bad_words holds {shown(word)}; wanted texts or sequences of token ids")
        if not (word.strip() if isinstance(word, str) else plain[-1]):
            raise RequestError(f"bad_words holds {shown(word)}; wanted words that are not empty")
    _check_total("bad_words", (word for word in plain if isinstance(word, str)))
    return tuple(plain)


def _structured_outputs(form: Any) -> StructuredOutputs | None:
    if form is None or isinstance(form, StructuredOutputs):
        return form
    if isinstance(form, Mapping) and all(isinstance(name, str) for name in form):
        return StructuredOutputs(**form)
    raise RequestError(f"structured_outputs is {shown(form)}; wanted a StructuredOutputs")


def _processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    plain = tuple(items("logits_processors", processors, MAX_PROCESSORS))
    for processor in plain:
        if not callable(processor):
            got = f"logits_processors holds {shown(processor)}"
            raise RequestError(f"{got}; wanted callables of (prompt_token_ids, output_token_ids, logits)")
    return plain


def _flag(name: str, value: bool) -> bool:
    check_flag(name, value)
    return value


def _allowed_token_ids(ids: Any) -> tuple[int, ...] | None:
    allowed = set(token_ids("allowed_token_ids", ids, MAX_ALLOWED))
    if not allowed:
        raise RequestError(f"allowed_token_ids is {shown(ids)}; wanted at least one id")
    return tuple(sorted(allowed))


# Beyond such penalties float32 has no products of them with logits.
_REPETITION: dict[str, Any] = {"wanted": "1e-30 to 1e30; 1 is neutral", "low": 1e-30, "high": 1e30}
_PENALTY: dict[str, Any] = {"wanted": "-2 to 2", "low": -2.0, "high": 2.0, "optional": False}
_SHARE: dict[str, Any] = {"wanted": "above 0, at most 1", "high": 1.0, "zero": False}
_SEED: dict[str, Any] = {"wanted": "a 64-bit one", "low": -SEED_LIMIT, "high": SEED_LIMIT - 1}
# Of each field what it is where it is left open, what that is stored as, and what any other value becomes.
_CHECKS: dict[str, tuple[object, object, Callable[[Any], object]]] = {
    "n": (1, 1, partial(integer, "n", wanted="at least 1", low=1, high=MAX_ANSWERS, optional=False)),
    "logprobs": (None, None, partial(integer, "logprobs", wanted="0 or more", low=0)),
    "prompt_logprobs": (None, None, partial(integer, "prompt_logprobs", wanted="0 or more", low=0)),
    "max_tokens": (None, None, partial(integer, "max_tokens", wanted="at least 1", low=1)),
    "min_tokens": (0, 0, partial(integer, "min_tokens", wanted="0 or more", low=0, optional=False)),
    "temperature": (None, None, partial(number, "temperature", wanted="0 (greedy) to 3e38", high=3e38)),
    "top_k": (None, None, partial(integer, "top_k", wanted="at least 1, or 0 for off", low=-1)),
    "top_p": (None, None, partial(number, "top_p", **_SHARE)),
    "min_p": (None, None, partial(number, "min_p", wanted="0 to 1", high=1.0)),
    "typical_p": (None, None, partial(number, "typical_p", **_SHARE)),
    "presence_penalty": (0.0, 0.0, partial(number, "presence_penalty", **_PENALTY)),
    "frequency_penalty": (0.0, 0.0, partial(number, "frequency_penalty", **_PENALTY)),
    "repetition_penalty": (None, None, partial(number, "repetition_penalty", **_REPETITION)),
    "logit_bias": (..., ..., _biases),
    "allowed_token_ids": (None, None, _allowed_token_ids),
    "bad_words": (None, (), _bad_words),
    "structured_outputs": (None, None, _structured_outputs),
    "logits_processors": (None, (), _processors),
    "seed": (None, None, partial(integer, "seed", **_SEED)),
    "stop": (None, (), _stop_strings),
    "stop_token_ids": (None, (), partial(token_ids, "stop_token_ids", most=MAX_STOPS)),
    "ignore_eos": (False, False, partial(_flag, "ignore_eos")),
    "include_stop_str_in_output": (False, False, partial(_flag, "include_stop_str_in_output")),
    "skip_special_tokens": (True, True, partial(_flag, "skip_special_tokens")),
    "detokenize": (None, None, partial(_flag, "detokenize")),
}
