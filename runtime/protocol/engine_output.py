"""What the engine's core reports of one request: new token ids, and its end."""

from typing import Literal, NamedTuple

from ...common.errors import LaminaError
from .scheduler_output import TokenLogprobs

FinishReason = Literal["stop", "length", "abort"]


class Timeline(NamedTuple):
    """When things happened to a request, by time.monotonic() of the core; None where they have not."""

    queued: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Finish(NamedTuple):
    """The end of a request, after which nothing comes of it and none of its blocks is held."""

    reason: FinishReason
    times: Timeline
    stop_reason: int | str | None = None  # the caller's token id or string that ended it, or "deadline"
    num_cached_tokens: int = 0  # of the prompt, whose keys and values were in the prefix cache
    num_preemptions: int = 0
    error: LaminaError | None = None  # what ended it, where that was a fault


class EngineOutput(NamedTuple):
    """What became of a request since the output before: a tuple, of which a step makes one a request.

    To deliver one twice, or one that overlaps those before, is harmless: `num_before` says how many output
    tokens came earlier, and who has more of them skips the overlap. The last one alone has a `finish`.
    """

    request_id: str
    num_before: int
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the new tokens, where wanted
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # where wanted, with the first: from the second token on
    finish: Finish | None = None
    pooled: bytes | None = None  # with its end, where a result was wanted in place of tokens: as float32
