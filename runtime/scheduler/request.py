"""One request inside the engine's core: what it wants, and how far it has come."""

import enum
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..pooling_params import PoolingParams
from ..protocol.engine_output import FinishReason, Timeline
from ..protocol.scheduler_output import TokenLogprobs
from ..sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands; PREEMPTED is waiting again, with its blocks given up and its tokens kept."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """A request inside the engine. Its tokens are the prompt, then the output as far as the host has read it.

    The parts of the scheduler write it, each what it is in charge of, through the methods below. While it
    runs, how far it has come stands in its row of the running batch.
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
    adapter: str | None = None  # the digest of what it is computed with beside the model
    grammar: str | None = None  # that the output keeps to
    pooling: PoolingParams | None = None  # what is wanted in place of tokens: it ends with its prompt
    pooled: bytes | None = None  # the result, once it is there
    is_counted: bool = True  # among the requests that ended; not one that is part of another
    row: int = -1  # in the running batch; -1: in none
    last_step: int = 0  # the last step that had a part of it, as of when it left its row
    num_computed: int = 0  # tokens in its blocks, as of when it left its row
    num_cached_tokens: int = 0  # of the prompt, prefix-cache hits of the first step that was not undone
    has_begun: bool = False  # such a step is over
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    arrival: int = -1
    rank: tuple[float, int] = (0.0, -1)  # lower ones are served first
    times: Timeline = field(default_factory=Timeline)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the output, where wanted
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the second token on
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
    def adjusts(self) -> bool:
        """Whether logits are adjusted before a token is chosen."""
        return self.grammar is not None or self.params.adjusts

    @property
    def may_jump(self) -> bool:
        """Whether its grammar alone decides where it leaves one token, and nothing is to be told of that."""
        params = self.params
        others = params.allowed_token_ids, params.bad_words, params.logits_processors
        return self.grammar is not None and params.logprobs is None and not any(others)

    @property
    def num_reusable(self) -> int:
        """How many first tokens may come from the prefix cache, as only their keys and values are wanted.

        The last token is always computed. A token whose log-probability is wanted is read off the token
        before it, so that one is computed, too; and so is every token that goes into a mean.
        """
        if self.pooling is not None and not self.pooling.reuses_prefix:
            return 0
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

    def clamp(self, max_total_tokens: int) -> None:
        """It may have so many tokens in all, and not more."""
        self.max_total_tokens = min(self.max_total_tokens, max_total_tokens)

    def arrive(self, arrival: int, rank: tuple[float, int], now: float) -> None:
        """It is queued, as the arrival-th of all."""
        self.arrival, self.rank = arrival, rank
        self.times = self.times._replace(queued=now)

    def start(self, num_cached: int, now: float) -> None:
        """It runs, with so many tokens of the prefix cache, which are counted where it has not begun yet."""
        self.status = RequestStatus.RUNNING
        if self.times.first_scheduled is None:
            self.times = self.times._replace(first_scheduled=now)
        if not self.has_begun:
            self.num_cached_tokens = num_cached

    def begin(self) -> None:
        """The step that it began in is over: its prefix-cache hits were really there."""
        self.has_begun = True

    def undo_start(self) -> None:
        """The step that it began in never was."""
        self.num_cached_tokens = 0

    def enter_row(self, row: int) -> None:
        """It stands in that row of the running batch, from now on."""
        self.row = row

    def leave_row(self, last_step: int = 0, num_computed: int = 0) -> None:
        """It has no row any more; so many tokens were computed, the last of them by that step."""
        self.row, self.last_step, self.num_computed = -1, last_step, num_computed

    def give_back(self) -> None:
        """It has no blocks, so nothing is computed of it."""
        self.num_computed = 0

    def preempt(self) -> None:
        """It waits again, with the tokens that it has."""
        self.num_preemptions += 1
        self.status = RequestStatus.PREEMPTED

    def note_first_token(self, now: float) -> None:
        """The host has read its first token."""
        self.times = self.times._replace(first_token=now)

    def end(self, reason: FinishReason, stop_reason: int | str | None, now: float) -> None:
        """It has ended; the finish reason comes last, as others read by it that the rest is there."""
        self.stop_reason = stop_reason
        self.times = self.times._replace(finished=now)
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason

    def reset(self, now: float) -> None:
        """Stand where the tokens are that it has, whatever was under way: nothing is computed of it."""
        self.leave_row()
        if not self.has_begun:
            self.num_cached_tokens = 0
        del self.logprobs[len(self.output_token_ids) :]
        del self.prompt_logprobs[self.num_reported :]
        if self.output_token_ids and self.times.first_token is None:
            self.times = self.times._replace(first_token=now)
        if self.finish_reason is None:
            was_admitted = self.times.first_scheduled is not None
            self.status = RequestStatus.PREEMPTED if was_admitted else RequestStatus.WAITING

    def report(self, logprobs: TokenLogprobs) -> None:
        """Keep the log-probabilities of the next token of the output."""
        self.logprobs.append(logprobs)

    def report_prompt(self, logprobs: Sequence[TokenLogprobs], count: int) -> None:
        """Keep the log-probabilities of the next tokens of the prompt, so many; none where no model runs."""
        self.prompt_logprobs += logprobs
        self.num_reported += count

    def report_pooled(self, pooled: bytes | None) -> None:
        """Keep its result; None where no model runs."""
        self.pooled = pooled

    def append(self, token_ids: Iterable[int]) -> bool:
        """Take in tokens up to the first that ends it, and reports no further; returns whether one does."""
        for token in token_ids:
            self.output_token_ids.append(token)
            if self.end_by_token() is not None:
                break
        del self.logprobs[len(self.output_token_ids) :]
        return self.end_by_token() is not None

    def takes(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """How many of the tokens that follow for certain it may have, and whether the last of them ends it.

        One that would end it before min_tokens is not among them.
        """
        if self.end_by_token() is not None:
            return 0, False
        room = self.max_total_tokens - self.num_tokens
        num_early = self.params.min_tokens - len(self.output_token_ids)
        for place, token in enumerate(token_ids[:room]):
            if token in self.stop_token_ids:
                return (place, False) if place < num_early else (place + 1, True)
        return min(len(token_ids), room), len(token_ids) >= room

    def force(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that follow for certain, all of which it may have."""
        self.output_token_ids += token_ids

    def end_by_token(self) -> tuple[FinishReason, int | str | None] | None:
        """How its newest token ends it, as finish reason and stop reason; None where it does not."""
        tokens = self.output_token_ids
        if tokens and self.pooling is not None:
            return "stop", None
        if len(tokens) > self.params.min_tokens and tokens[-1] in self.stop_token_ids:
            return "stop", tokens[-1] if tokens[-1] in (self.params.stop_token_ids or ()) else None
        if tokens and self.num_tokens >= self.max_total_tokens:
            return "length", None
        return None

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


def append_each(requests: Iterable[Request], token_ids: Iterable[int]) -> list[Request]:
    """A token for each of these; returns whom it may stop."""
    stopped = []
    for request, token in zip(requests, token_ids, strict=True):
        request.output_token_ids.append(token)
        if token in request.stop_token_ids:
            stopped.append(request)
    return stopped


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"{len(token_ids)}i", *token_ids)  # thrice as fast as an array
