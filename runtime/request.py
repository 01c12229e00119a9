"""One request: what the caller asks for, what is checked at the border, and how far it has come."""

import dataclasses
import enum
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..common.errors import RequestError

FinishReason = Literal["stop", "length", "abort"]

SEED_LIMIT = 2**63  # seeds travel to the device as int64


class RequestStatus(enum.Enum):
    """Where a request stands; PREEMPTED is waiting again, with its blocks given up and its tokens kept."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; None leaves a choice to the model's defaults.

    temperature 0 is greedy; top_k 0 or -1 is off. max_tokens is a ceiling: where the context ends sooner, so
    does the answer. Until min_tokens have come, ids that stop are not sampled, stop strings not looked for.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool | None = None

    def __post_init__(self) -> None:
        self._settle("max_tokens", _integer("max_tokens", self.max_tokens, "at least 1", low=1))
        self._settle(
            "min_tokens", _integer("min_tokens", self.min_tokens, "0 or more", low=0, optional=False)
        )
        self._settle("temperature", _number("temperature", self.temperature, "0 (greedy) or more"))
        self._settle("top_k", _integer("top_k", self.top_k, "at least 1, or 0 for off", low=-1))
        self._settle("top_p", _number("top_p", self.top_p, "above 0, at most 1", high=1.0, zero=False))
        self._settle("min_p", _number("min_p", self.min_p, "0 to 1", high=1.0))
        self._settle(
            "seed", _integer("seed", self.seed, "a 64-bit one", low=-SEED_LIMIT, high=SEED_LIMIT - 1)
        )
        self._settle("stop", _stop_strings(self.stop))
        self._settle("stop_token_ids", _stop_ids(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _check_flag(name, getattr(self, name))
        if self.detokenize is not None:
            _check_flag("detokenize", self.detokenize)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower it"
            )

    def resolve(self, defaults: SamplingDefaults | None, *, seed: int) -> "SamplingParams":
        """With nothing left open: the request's own value, else the model's default, else the neutral one."""

        def choose(name: str, neutral: float) -> Any:
            own, model = getattr(self, name), getattr(defaults, name, None)
            return next(value for value in (own, model, neutral) if value is not None)

        return dataclasses.replace(
            self,
            temperature=choose("temperature", 1.0),
            top_k=choose("top_k", 0),
            top_p=choose("top_p", 1.0),
            min_p=choose("min_p", 0.0),
            seed=seed if self.seed is None else self.seed,
        )

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(
            self, name, value
        )  # only while being built: a checked value in its one stored form


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """How a request is served, whatever it samples.

    priority: lower is served first; one step of it outweighs an hour of waiting, so that nobody waits for
    ever. timeout: seconds from now after which the request ends with what it has. cache_salt: only requests
    of the same salt share blocks of the cache, so that nobody learns from the time taken what others asked.
    """

    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if _as_int(self.priority) is None:
            raise RequestError(f"priority is {self.priority!r}; wanted an integer, lower first")
        _number("timeout", self.timeout, "of seconds, above 0", zero=False)
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt is {self.cache_salt!r}; wanted a string")


@dataclass(slots=True)
class Timeline:
    """When things happened to a request, by time.monotonic(); None where they have not."""

    queued: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """A request inside the engine. Only the Scheduler writes it.

    Its tokens are the prompt, then the output, as far as the host has read them. While it runs, its counts
    stand in a row of the scheduler's Rows.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # resolved
    stop_token_ids: frozenset[int] = (
        frozenset()
    )  # every EOS id and the caller's; with ignore_eos the caller's alone
    max_total_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    priority: int = 0  # lower is served first
    timeout: float | None = None  # seconds from when it is queued
    cache_salt: str = ""  # blocks are shared only with requests of the same one
    row: int = -1  # in the scheduler's Rows; -1: in none
    last_step: int = 0  # the last step that had a part of it, as of when it left its row
    num_computed: int = 0  # tokens in its blocks, as of when it left its row
    num_cached_tokens: int = 0  # of the prompt, found in the cache when it was first let in
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    arrival: int = -1
    rank: tuple[float, int] = (0.0, -1)  # lower ones are served first
    times: Timeline = field(default_factory=Timeline)

    @property
    def deadline(self) -> float | None:
        """When its time is up, by the clock of its times; None for one that has all the time."""
        queued = self.times.queued
        return None if self.timeout is None or queued is None else queued + self.timeout

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at positions start to stop - 1, be they prompt or output."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return tuple(self.output_token_ids[start - num_prompt : stop - num_prompt])
        prompt = self.prompt_token_ids[start:stop]
        return prompt if stop <= num_prompt else prompt + tuple(self.output_token_ids[: stop - num_prompt])


def stopping_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The ids that end a request: the caller's own, and every EOS unless ignore_eos."""
    own = params.stop_token_ids or ()
    return frozenset(own if params.ignore_eos else (*own, *eos_token_ids))


def total_tokens(num_prompt_tokens: int, params: SamplingParams, max_model_len: int) -> int:
    """How long prompt and output may become together."""
    if params.max_tokens is None:
        return max_model_len
    return min(num_prompt_tokens + params.max_tokens, max_model_len)


def check_prompt(
    token_ids: Iterable[int], *, vocab_size: int, max_model_len: int, capacity_tokens: int
) -> tuple[int, ...]:
    """The prompt as plain ints, if it can be served here; else RequestError, saying what is wrong."""
    ids = _plain_ids(token_ids)
    if not ids:
        raise RequestError("the prompt is empty (0 tokens); give at least one token, such as the model's BOS")
    for wrong in (min(ids), max(ids)):
        if not 0 <= wrong < vocab_size:
            raise RequestError(
                f"prompt token {wrong} at position {ids.index(wrong)} is outside the vocabulary; "
                f"ids must be 0 to {vocab_size - 1}: was the prompt encoded by another model's tokenizer?"
            )
    if len(ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, but max_model_len {max_model_len} leaves room for at most "
            f"{max_model_len - 1} and one new token; shorten the prompt or raise max_model_len"
        )
    if len(ids) > capacity_tokens:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, but the whole KV cache holds {capacity_tokens}; "
            "shorten the prompt, or raise num_kv_blocks or memory_fraction"
        )
    return ids


def _plain_ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    if isinstance(token_ids, (str, bytes)):
        raise RequestError(f"the prompt is {type(token_ids).__name__}, wanted token ids; encode text first")
    try:
        ids = tuple(token_ids)
    except TypeError as error:
        raise RequestError(f"the prompt is {token_ids!r}, wanted a sequence of token ids") from error
    if set(map(type, ids)) <= {int}:
        return ids
    return tuple(_plain_id(id_, position) for position, id_ in enumerate(ids))


def _plain_id(value: object, position: int) -> int:
    plain = _as_int(value)
    if plain is None:
        raise RequestError(f"prompt token {value!r} at position {position} is no integer; give token ids")
    return plain


def _as_int(value: object) -> int | None:
    """A Python, numpy or tensor integer as a plain one; None for anything else, bools included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # the TypeError is the question asked
    except TypeError:
        return None


def _integer(
    name: str, value: object, wanted: str, *, low: int, high: int | None = None, optional: bool = True
) -> int | None:
    if value is None and optional:
        return None
    plain = _as_int(value)
    if plain is None or plain < low or (high is not None and plain > high):
        raise RequestError(f"{name} is {value!r}; wanted an integer, {wanted}")
    return plain


def _number(name: str, value: Any, wanted: str, *, high: float = math.inf, zero: bool = True) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (0 <= number <= high and number < math.inf and (zero or number > 0)):
        raise RequestError(f"{name} is {value!r}; wanted a number, {wanted}")
    return number


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(() if stop is None else _iterate("stop", stop))
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"stop holds {string!r}; wanted non-empty strings, or stop=None for none")
    return strings


def _stop_ids(ids: Any) -> tuple[int, ...]:
    plain = []
    for value in () if ids is None else _iterate("stop_token_ids", ids):
        id_ = _as_int(value)
        if id_ is None or id_ < 0:
            raise RequestError(f"stop_token_ids holds {value!r}; wanted token ids, 0 or more")
        plain.append(id_)
    return tuple(plain)


def _iterate(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {value!r}; wanted a sequence")
    return value


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; wanted True or False")
