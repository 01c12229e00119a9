"""Log-probabilities that requests want: which ones a step is to report, and whose they are."""

from collections.abc import Sequence

import numpy as np

from ..protocol.scheduler_output import Ints, StepLogprobs, WantedLogprobs
from .request import Request
from .running_batch import RunningBatch


def wanted_logprobs(batch: RunningBatch, counts: Ints, num_sampled: Ints) -> WantedLogprobs | None:
    """What a step of so many tokens and samples of the first rows can report of what their requests want."""
    reporters = [row for row in batch.sampling.reporters if row < len(counts)]
    samples, starts = np.cumsum(num_sampled) - num_sampled, np.cumsum(counts) - counts
    sampled: list[int] = []
    before: list[int] = []
    targets: list[int] = []
    spans: list[tuple[int, int]] = []
    num_top = 0
    for row in reporters:
        request = batch.requests[row]
        if num_sampled[row] and request.params.logprobs is not None:
            sampled += range(int(samples[row]), int(samples[row] + num_sampled[row]))
            num_top = max(num_top, request.params.logprobs)
        start = batch.num_computed(request)
        first, last = _to_report(request, start, start + int(counts[row]))
        if first < last:
            before += range(int(starts[row]) + first - start, int(starts[row]) + last - start)
            targets += request.prompt_token_ids[first + 1 : last + 1]
            spans.append((row, last - first))
            num_top = max(num_top, request.params.prompt_logprobs or 0)
    if not sampled and not spans:
        return None
    return WantedLogprobs(
        num_top=num_top,
        samples=np.array(sampled, np.int64),
        before=np.array(before, np.int64),
        targets=np.array(targets, np.int32),
        spans=tuple(spans),
    )


def take_in_logprobs(
    wanted: WantedLogprobs,
    logprobs: StepLogprobs | None,
    owners: Sequence[Request | None],
    rows: Sequence[Request | None],
) -> None:
    """Give each live request what it wanted.

    logprobs: None where no model runs, as in a replay. owners: of each of the step's samples, None for one of
    a draft that did not hold. rows: of each of the step's rows, None for one whose request is live no more.
    """
    for place, number in enumerate(wanted.samples.tolist()):
        owner = owners[number]
        if logprobs is not None and owner is not None and owner.finish_reason is None:
            owner.report(logprobs.samples[place])
    start = 0
    for row, count in wanted.spans:
        request = rows[row]
        if request is not None and request.finish_reason is None:
            request.report_prompt(
                logprobs.prompts[start : start + count] if logprobs is not None else (), count
            )
        start += count


def _to_report(request: Request, start: int, stop: int) -> tuple[int, int]:
    """Which positions of that stretch come before a token of the prompt that is wanted and not reported."""
    if request.params.prompt_logprobs is None:
        return start, start
    return max(start, request.num_reported), min(stop, len(request.prompt_token_ids) - 1)
