"""Beam searches served: in each round every live beam is a request for one token and its likeliest rivals."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..protocol.engine_output import Timeline
from ..protocol.engine_request import EngineRequest
from ..request_options import RequestOptions
from ..sampling_params import SamplingParams
from ..tokenization.detokenizer import text_after
from ..tokenization.tokenizer import Tokenizer
from .beam_search import Beam, BeamSearch, Likeliest
from .output_processor import Answer, Submission
from .outputs import CompletionOutput, RequestOutput, RequestTimes


@dataclass(kw_only=True, slots=True)
class Searched:
    """A prompt and its search; the counts and times are those of its requests together."""

    name: str
    asked_id: str  # what the caller knows it by
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    search: BeamSearch
    first: Timeline | None = None
    last: Timeline | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_requests: int = 0
    is_aborted: bool = False  # to be over with the round that is in flight

    def take_in(self, answers: Sequence[Answer]) -> None:
        """Takes in what became of the live beams of a round."""
        finishes = [answer.finish for answer in answers if answer.finish is not None]
        if self.first is None:
            self.first = finishes[0].times
            self.num_cached_tokens = finishes[0].num_cached_tokens
        self.last = finishes[-1].times
        self.num_preemptions += sum(finish.num_preemptions for finish in finishes)
        cut_off = next((answer for answer in answers if not answer.logprobs), None)
        if cut_off is not None or self.is_aborted:
            self.search.stop("abort", None if cut_off is None else cut_off.stop_reason)
        else:
            self.search.advance([_likeliest(answer, self.search.num_top) for answer in answers])

    @property
    def times(self) -> Timeline:
        """From when the first of its requests was queued to the end of the last."""
        assert self.first is not None
        assert self.last is not None
        first, last = self.first, self.last
        return Timeline(queued=first.queued, first_token=first.first_token, finished=last.finished)

    @property
    def num_tokens(self) -> int:
        """Of its longest sequence."""
        return max((len(beam.token_ids) for beam in self.search.best()), default=0)

    def output(self, tokenizer: Tokenizer | None) -> RequestOutput:
        """Returns the best sequences, once the search is over."""
        times = self.times
        assert times.queued is not None
        return RequestOutput(
            request_id=self.asked_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(
                _answer(self.prompt_token_ids, beam, index, tokenizer)
                for index, beam in enumerate(self.search.best())
            ),
            times=RequestTimes(queued=times.queued, first_token=times.first_token, finished=times.finished),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )


class BeamRounds:
    """Searches advanced together. A beam finds what it shares with the round before in the prefix cache.

    Of a beam, fewer tokens than a block has are computed again in every round, so that no block has to be
    copied when beams part.
    """

    def __init__(self, options: RequestOptions, adapter: str | None = None) -> None:
        """adapter: the digest of the one that options name, if any."""
        self._options, self._adapter = options, adapter
        self._deadline = None if options.timeout is None else time.monotonic() + options.timeout

    def of(self, searched: Sequence[Searched]) -> Iterator[list[Submission]]:
        """Yields the requests of each round, to be seen to their ends, until every search is over."""
        while live := [each for each in searched if each.search.live]:
            options, num_top = self._options_now(), max(each.search.num_top for each in live)
            rounds = [
                [_asked(each, beam, num_top, options, self._adapter) for beam in each.search.live]
                for each in live
            ]
            yield [submission for submissions in rounds for submission in submissions]
            for each, submissions in zip(live, rounds, strict=True):
                each.take_in([submission.answer for submission in submissions])

    def _options_now(self) -> RequestOptions:
        """Returns the options with what is left of the time."""
        if self._deadline is None:
            return self._options
        left = max(self._deadline - time.monotonic(), 1e-9)
        return dataclasses.replace(self._options, timeout=left)


def _asked(
    searched: Searched, beam: Beam, num_top: int, options: RequestOptions, adapter: str | None
) -> Submission:
    """Returns a request for the likeliest tokens after a beam."""
    tokens = (*searched.prompt_token_ids, *beam.token_ids)
    searched.num_requests += 1
    name = f"{searched.name}-{searched.num_requests}"
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=num_top, detokenize=False)
    request = EngineRequest(
        request_id=name,
        prompt_token_ids=tokens,
        params=params.resolve(None, seed=0),
        max_total_tokens=len(tokens) + 1,
        priority=options.priority,
        timeout=options.timeout,
        cache_salt=options.cache_salt,
        adapter=adapter,
        is_counted=False,
    )
    return Submission(request, Answer(request_id=name, asked_id=searched.asked_id))


def _likeliest(answer: Answer, num_top: int) -> Likeliest:
    (first,) = answer.logprobs
    top = slice(1, 1 + num_top)  # after the token that the request got
    return tuple(zip(first.token_ids[top], first.logprobs[top], strict=True))


def _answer(prompt: Sequence[int], beam: Beam, index: int, tokenizer: Tokenizer | None) -> CompletionOutput:
    shown = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
    return CompletionOutput(
        index=index,
        text="" if tokenizer is None else text_after(tokenizer, prompt, shown),
        token_ids=beam.token_ids,
        finish_reason=beam.finish_reason,
        stop_reason=beam.stop_reason,
        cumulative_logprob=beam.logprob,
    )
