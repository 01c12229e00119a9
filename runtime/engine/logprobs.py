"""Log-probabilities as callers get them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..protocol.scheduler_output import TokenLogprobs
from ..sampling_params import SamplingParams
from ..tokenization.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0  # what lamina::top_logprobs says of a token that cannot be


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was in its place, by the model alone: before any setting of a request.

    rank: 1 for the likeliest. decoded_token: the token's text with its space, None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # by token id: the token itself first, then the likeliest in order


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobsFormatter:
    """The core's log-probabilities as callers get them: with as many of the likeliest as were asked for."""

    num_top: int | None = None  # beside each token of an answer; None: none are wanted
    num_prompt_top: int | None = None  # likewise of the prompt
    decode: Callable[[int], str] | None = None  # the text of a token

    def of_answer(self, logprobs: Sequence[TokenLogprobs]) -> tuple[Logprobs, ...] | None:
        """Returns those of some tokens of an answer, None where none are wanted."""
        top = self.num_top
        return None if top is None else tuple(self._formatted(own, top) for own in logprobs)

    def of_prompt(self, logprobs: Sequence[TokenLogprobs]) -> tuple[Logprobs | None, ...] | None:
        """Returns those of a prompt, with None for its first token; None where none are wanted."""
        top = self.num_prompt_top
        return None if top is None else (None, *(self._formatted(own, top) for own in logprobs))

    def _formatted(self, found: TokenLogprobs, num_top: int) -> Logprobs:
        own, *top = found.token_ids[: 1 + num_top]
        numbers_of = {own: (found.logprobs[0], found.rank)}
        for rank, token_id in enumerate(top, start=1):
            numbers_of.setdefault(token_id, (found.logprobs[rank], rank))
        return {token_id: Logprob(*numbers, self._text(token_id)) for token_id, numbers in numbers_of.items()}

    def _text(self, token_id: int) -> str | None:
        return None if self.decode is None else self.decode(token_id)


def formatter_of(params: SamplingParams, index: int, tokenizer: Tokenizer | None) -> LogprobsFormatter:
    """Returns the formatter of the answer of that index, with texts of tokens where there is text at all."""
    return LogprobsFormatter(
        num_top=params.logprobs,
        num_prompt_top=params.prompt_logprobs if index == 0 else None,
        decode=None if tokenizer is None or params.detokenize is False else tokenizer.text_of,
    )


def cumulative(logprobs: Sequence[TokenLogprobs]) -> float:
    """Returns the log-probability of all of these tokens together; 0.0 of none."""
    return sum((each.logprobs[0] for each in logprobs), 0.0)
