"""One request inside the engine's core: what it wants, and how far it has come."""

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..protocol.engine_output import FinishReason, Timeline
from ..protocol.scheduler_output import TokenReport
from ..sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands; PREEMPTED is waiting again, with its blocks given up and its tokens kept."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


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
