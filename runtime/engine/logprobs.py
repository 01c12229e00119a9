"""Log-probabilities as callers get them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..protocol.scheduler_output import TokenReport
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
    """The core's reports as a caller gets them: with as many of the likeliest tokens as were asked for."""

    num_top: int | None = None  # beside each token of an answer; None: no report is wanted
    num_prompt_top: int | None = None  # likewise of the prompt
    decode: Callable[[int], str] | None = None  # the text of a token

    def of_answer(self, reports: Sequence[TokenReport]) -> tuple[Logprobs, ...] | None:
        """Those of some tokens of an answer, None where none are wanted."""
        top = self.num_top
        return None if top is None else tuple(self._formatted(report, top) for report in reports)

    def of_prompt(self, reports: Sequence[TokenReport]) -> tuple[Logprobs | None, ...] | None:
        """Those of a prompt, whose first token has None, as it comes after nothing; None where unwanted."""
        top = self.num_prompt_top
        return None if top is None else (None, *(self._formatted(report, top) for report in reports))

    def _formatted(self, report: TokenReport, num_top: int) -> Logprobs:
        own, *top = report.token_ids[: 1 + num_top]
        found = {own: (report.logprobs[0], report.rank)}
        for rank, token_id in enumerate(top, start=1):
            found.setdefault(token_id, (report.logprobs[rank], rank))
        return {token_id: Logprob(*numbers, self._text(token_id)) for token_id, numbers in found.items()}

    def _text(self, token_id: int) -> str | None:
        return None if self.decode is None else self.decode(token_id)


def formatter_of(params: SamplingParams, index: int, tokenizer: Tokenizer | None) -> LogprobsFormatter:
    """The formatter of the answer of that index, with texts of tokens where there is text at all."""
    return LogprobsFormatter(
        num_top=params.logprobs,
        num_prompt_top=params.prompt_logprobs if index == 0 else None,
        decode=None if tokenizer is None or params.detokenize is False else tokenizer.text_of,
    )


def cumulative(reports: Sequence[TokenReport]) -> float:
    """The log-probability of all of these tokens together; 0.0 of none."""
    return sum((report.logprobs[0] for report in reports), 0.0)
