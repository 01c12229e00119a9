"""All answers to one prompt: made together, given back together."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...common.errors import RequestError
from ..sampling_params import SEED_LIMIT, SamplingParams
from .logprobs import cumulative
from .output_processor import Answer, Reader, Submission
from .outputs import RequestOutput, RequestTimes, StreamDelta

CHILD_STEP = 0xD1B54A32D192ED03  # odd and without a pattern, so that answers draw apart


@dataclass(frozen=True, kw_only=True, slots=True)
class ParentRequest:
    """What is being written to one prompt: n answers, or the best_of that n are chosen from.

    Each is a request of its own, so whatever becomes of one leaves the others alone. They share the blocks
    of the prompt as all requests do that begin alike.
    """

    prompt: str | None
    num_wanted: int
    submissions: tuple[Submission, ...]

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Each, in the order of their indices."""
        return tuple(submission.answer for submission in self.submissions)

    def require_streamable(self) -> None:
        """Raises RequestError where the answers wanted are chosen among more, once all have ended."""
        if len(self.submissions) > self.num_wanted:
            raise RequestError(
                f"best_of is {len(self.submissions)}, above n {self.num_wanted}; wanted none in a stream, as "
                "the best answers are known when all have ended; ask for the whole output"
            )

    def output(self) -> RequestOutput:
        """Returns the answers wanted, once all are over: in order, or of more than wanted the best first."""
        first, *_ = answers = self.answers
        times = [answer.times for answer in answers]
        finishes = [answer.finish for answer in answers if answer.finish is not None]
        begun = [time.first_token for time in times if time.first_token is not None]
        ended = [time.finished for time in times if time.finished is not None]
        return RequestOutput(
            request_id=first.asked_id,
            prompt=self.prompt,
            prompt_token_ids=self.submissions[0].request.prompt_token_ids,
            outputs=tuple(answer.completion(index) for index, answer in enumerate(self._chosen())),
            times=RequestTimes(
                queued=times[0].queued, first_token=min(begun, default=None), finished=max(ended)
            ),
            num_cached_tokens=finishes[0].num_cached_tokens,
            num_preemptions=sum(finish.num_preemptions for finish in finishes),
            prompt_logprobs=first.formatter.of_prompt(first.prompt_logprobs),
        )

    def _chosen(self) -> Sequence[Answer]:
        answers = self.answers
        if len(answers) == self.num_wanted:
            return answers
        return sorted(answers, key=_mean_logprob, reverse=True)[: self.num_wanted]


def params_of_each(params: SamplingParams) -> list[SamplingParams]:
    """Returns what each answer is drawn with, from resolved parameters: all alike but for their seeds.

    The first has the seed as given, and alone wants log-probabilities of the prompt, as it is the same for
    all. Where answers are to be compared, each wants those of its tokens.
    """
    assert params.seed is not None, "unresolved parameters"
    count = params.best_of or params.n
    if count == 1:
        return [params]
    logprobs = 0 if count > params.n and params.logprobs is None else params.logprobs
    first = dataclasses.replace(params, logprobs=logprobs)
    others = dataclasses.replace(first, prompt_logprobs=None)
    return [first] + [others.with_seed(_nth_seed(params.seed, index)) for index in range(1, count)]


def _nth_seed(seed: int, index: int) -> int:
    """Returns a seed of its own for each index, a signed 64-bit one."""
    return (seed + index * CHILD_STEP + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT


def _mean_logprob(answer: Answer) -> float:
    logprobs = answer.logprobs
    return cumulative(logprobs) / len(logprobs) if logprobs else float("-inf")


def new_deltas(readers: Sequence[Reader]) -> Iterator[StreamDelta]:
    """Yields what there is to read of these answers, in turns."""
    while found := [delta for reader in readers if (delta := reader.next()) is not None]:
        yield from found
