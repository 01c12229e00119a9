"""One request: how it is to be served, what is checked at the border, and how far it has come."""

import enum
import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from ...common.errors import RequestError, UnknownParameterError, shown
from ...common.names import refuse_unknown
from ..other_names import beside_sampling
from ..protocol.scheduler_output import TokenReport
from ..sampling_params import SamplingParams, stopping_token_ids
from ..validation import as_int, integer, number, text

MAX_PRIORITY = 2**31  # in hours of waiting, as floats hold it to the second

FinishReason = Literal["stop", "length", "abort"]


class RequestStatus(enum.Enum):
    """Where a request stands; PREEMPTED is waiting again, with its blocks given up and its tokens kept."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@refuse_unknown(UnknownParameterError, beside_sampling(each.name for each in fields(SamplingParams)))
@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """How a request is served, whatever it samples."""

    priority: int = 0
    """Lower is served first; one step of it outweighs an hour of waiting, so that nobody waits for ever."""
    timeout: float | None = None
    """Seconds from now after which the request ends with what it has."""
    cache_salt: str = ""
    """Only requests of the same salt share blocks of the KV cache, so that nobody learns from the time taken
    what others asked."""

    def __post_init__(self) -> None:
        wanted = f"-{MAX_PRIORITY} to {MAX_PRIORITY}, lower first"
        low, high = -MAX_PRIORITY, MAX_PRIORITY
        checked: dict[str, object] = {
            "priority": integer("priority", self.priority, wanted, low=low, high=high, optional=False),
            "timeout": number("timeout", self.timeout, "of seconds, above 0", zero=False),
            "cache_salt": text("cache_salt", self.cache_salt),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # in its stored form


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
    is_counted: bool = True  # among the requests that ended; not one that is part of another
    row: int = -1  # in the scheduler's Rows; -1: in none
    last_step: int = 0  # the last step that had a part of it, as of when it left its row
    num_computed: int = 0  # tokens in its blocks, as of when it left its row
    num_cached_tokens: int = 0  # of the prompt, found in the cache by the first step that was not undone
    has_begun: bool = False  # such a step is over
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    arrival: int = -1
    rank: tuple[float, int] = (0.0, -1)  # lower ones are served first
    times: Timeline = field(default_factory=Timeline)
    logprobs: list[TokenReport] = field(default_factory=list)  # of the output, where wanted
    prompt_logprobs: list[TokenReport] = field(default_factory=list)  # from the second token on
    num_reported: int = 0  # tokens of the prompt that these are of
    _prompt_bytes: bytes | None = field(default=None, init=False, repr=False)
    _plain_params: SamplingParams | None = field(default=None, init=False, repr=False)

    @property
    def plain_params(self) -> SamplingParams:
        """The parameters without code of the caller's, as another process can have them; one object."""
        if self._plain_params is None:
            self._plain_params = self.params.without_processors()
        return self._plain_params

    @property
    def num_reusable(self) -> int:
        """Of how many first tokens nothing is wanted but their keys and values; the last one is computed.

        A token whose log-probability is wanted is read off the token before it, so that one is, too.
        """
        last = len(self.prompt_token_ids) - 1
        if self.params.prompt_logprobs is None or self.num_reported == last:
            return self.num_tokens - 1
        return self.num_reported

    @property
    def deadline(self) -> float | None:
        """When its time is up, by the clock of its times; None for one that has all the time."""
        queued = self.times.queued
        return None if self.timeout is None or queued is None else queued + self.timeout

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def reset(self, now: float) -> None:
        """Stand where the tokens are that it has, whatever was under way: nothing is computed of it."""
        self.row, self.last_step, self.num_computed = -1, 0, 0
        if not self.has_begun:
            self.num_cached_tokens = 0
        del self.logprobs[len(self.output_token_ids) :]
        del self.prompt_logprobs[self.num_reported :]
        if self.output_token_ids and self.times.first_token is None:
            self.times.first_token = now
        if self.finish_reason is None:
            was_let_in = self.times.first_scheduled is not None
            self.status = RequestStatus.PREEMPTED if was_let_in else RequestStatus.WAITING

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at positions start to stop - 1, be they prompt or output."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return tuple(self.output_token_ids[start - num_prompt : stop - num_prompt])
        prompt = self.prompt_token_ids[start:stop]
        return prompt if stop <= num_prompt else prompt + tuple(self.output_token_ids[: stop - num_prompt])

    def token_bytes(self, start: int, stop: int) -> bytes:
        """The same, each as an int32."""
        if self._prompt_bytes is None:
            self._prompt_bytes = _packed(self.prompt_token_ids)
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self._prompt_bytes[4 * start : 4 * stop]
        answer = _packed(self.output_token_ids[max(0, start - num_prompt) : stop - num_prompt])
        return self._prompt_bytes[4 * start :] + answer


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"{len(token_ids)}i", *token_ids)  # thrice as fast as an array


def request_of(
    name: str,
    prompt: tuple[int, ...],
    params: SamplingParams,
    options: RequestOptions,
    *,
    eos_token_ids: frozenset[int],
    max_model_len: int,
) -> Request:
    """The request for one answer, of what is checked."""
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=params,
        stop_token_ids=stopping_token_ids(params, eos_token_ids),
        max_total_tokens=total_tokens(len(prompt), params, max_model_len),
        priority=options.priority,
        timeout=options.timeout,
        cache_salt=options.cache_salt,
    )


def total_tokens(num_prompt_tokens: int, params: SamplingParams, max_model_len: int) -> int:
    """How long prompt and output may become together."""
    if params.max_tokens is None:
        return max_model_len
    return min(num_prompt_tokens + params.max_tokens, max_model_len)


def check_prompt(
    token_ids: Iterable[int],
    *,
    vocab_size: int,
    max_model_len: int,
    capacity_tokens: int,
    declared_len: int | None = None,
) -> tuple[int, ...]:
    """The prompt as plain ints, if it can be served here; else RequestError, saying what is wrong."""
    ids = _plain_ids(token_ids, max_model_len, declared_len)
    if not ids:
        raise RequestError("the prompt is empty (0 tokens); give at least one token, such as the model's BOS")
    for wrong in (min(ids), max(ids)):
        if not 0 <= wrong < vocab_size:
            raise RequestError(
                f"prompt token {shown(wrong)} at position {ids.index(wrong)} is outside the vocabulary; "
                f"ids must be 0 to {vocab_size - 1}: was the prompt encoded by another model's tokenizer?"
            )
    if len(ids) > capacity_tokens:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, but the whole KV cache holds {capacity_tokens}; "
            "shorten the prompt, or raise num_kv_blocks or memory_fraction"
        )
    return ids


def _plain_ids(token_ids: Iterable[int], max_model_len: int, declared_len: int | None) -> tuple[int, ...]:
    if isinstance(token_ids, (str, bytes)):
        raise RequestError(f"the prompt is {type(token_ids).__name__}, wanted token ids; encode text first")
    try:
        ids = tuple(itertools.islice(token_ids, max_model_len))  # no more, however many there are
    except TypeError as error:
        raise RequestError(f"the prompt is {shown(token_ids)}, wanted a sequence of token ids") from error
    if len(ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {_length_of(token_ids)} tokens, but max_model_len {max_model_len} leaves room "
            f"for at most {max_model_len - 1} and one new token; shorten the prompt"
            f"{_longer(max_model_len, declared_len)}"
        )
    if set(map(type, ids)) <= {int}:
        return ids
    return tuple(_plain_id(id_, position) for position, id_ in enumerate(ids))


def _longer(max_model_len: int, declared_len: int | None) -> str:
    """How more than max_model_len could be had."""
    if declared_len is None or max_model_len < declared_len:
        return " or raise max_model_len"
    return f", as the checkpoint declares {declared_len} positions; only allow_long_context goes beyond"


def _length_of(token_ids: object) -> str:
    try:
        return str(len(token_ids))  # type: ignore[arg-type]  # the TypeError is the question asked
    except (TypeError, OverflowError):
        return "too many"


def _plain_id(value: object, position: int) -> int:
    plain = as_int(value)
    if plain is None:
        got = f"prompt token {shown(value)} at position {position}"
        raise RequestError(f"{got} is no integer; give token ids")
    return plain
