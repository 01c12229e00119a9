"""What callers get back: whole answers, and the pieces of a streamed one."""

from dataclasses import dataclass, field

from ..protocol.engine_output import FinishReason
from .logprobs import Logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimes:
    """When a request was queued, got its first token and ended, by time.monotonic()."""

    queued: float
    first_token: float | None
    finished: float | None

    def seconds_between(self, num_tokens: int) -> float | None:
        """Returns the seconds between its so many tokens, as a mean; None with fewer than two."""
        if self.first_token is None or self.finished is None or num_tokens < 2:
            return None
        return (self.finished - self.first_token) / (num_tokens - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One answer; the text is empty where it was not asked for or the model has no tokenizer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = (
        None  # the token id or string that ended it, None for an EOS or the length
    )
    logprobs: tuple[Logprobs, ...] | None = None  # of each token, where wanted
    pooled: bytes | None = None  # what was wanted in place of tokens, as float32
    cumulative_logprob: float | None = None  # their sum, where they were computed
    times: RequestTimes | None = field(default=None, compare=False)  # its own; beams have none

    @property
    def seconds_between_tokens(self) -> float | None:
        """From its first token to its end, for each further token; None with fewer than two."""
        return None if self.times is None else self.times.seconds_between(len(self.token_ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A prompt with its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    times: RequestTimes
    num_cached_tokens: int = 0  # of the prompt, whose keys and values were in the cache
    num_preemptions: int = 0
    prompt_logprobs: tuple[Logprobs | None, ...] | None = (
        None  # of each token of the prompt, where wanted; the first has none
    )

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text

    @property
    def seconds_to_first_token(self) -> float | None:
        """From being queued to its first token; None without a token."""
        first = self.times.first_token
        return None if first is None else first - self.times.queued

    @property
    def seconds_between_tokens(self) -> float | None:
        """The mean over its answers of each's own; None where none has two tokens."""
        if any(answer.times is None for answer in self.outputs):
            return self.times.seconds_between(max(len(answer.token_ids) for answer in self.outputs))
        own = [answer.seconds_between_tokens for answer in self.outputs]
        known = [seconds for seconds in own if seconds is not None]
        return sum(known) / len(known) if known else None


@dataclass(kw_only=True, slots=True)
class StreamDelta:
    """What one step added to one answer; the last delta of an answer alone has a finish_reason.

    Where the prompt's log-probabilities are wanted, the first delta of the first answer has them. One is made
    for each token that is read: it is not frozen, as that takes thrice the time.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # as CompletionOutput has it, beside the finish_reason
    logprobs: tuple[Logprobs, ...] | None = None  # of each token, where wanted
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
