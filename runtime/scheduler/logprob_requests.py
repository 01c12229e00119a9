"""Log-probabilities on the scheduler's side: which a step is to tell, and whom it has told."""

from collections.abc import Sequence

import numpy as np

from ..protocol.scheduler_output import Ints, Reports, WantedReports
from .request import Request
from .running_batch import Rows


def wanted_reports(rows: Rows, counts: Ints, num_sampled: Ints) -> WantedReports | None:
    """What a step of so many tokens of the first rows can tell of what their requests want."""
    reporters = [row for row in rows.reporters if row < len(counts)]
    places, starts = np.cumsum(num_sampled) - num_sampled, np.cumsum(counts) - counts
    sampled: list[int] = []
    before: list[int] = []
    targets: list[int] = []
    spans: list[tuple[int, int]] = []
    num_top = 0
    for row in reporters:
        request = rows.requests[row]
        if num_sampled[row] and request.params.logprobs is not None:
            sampled += range(int(places[row]), int(places[row] + num_sampled[row]))
            num_top = max(num_top, request.params.logprobs)
        start = int(rows.computed[row])
        first, last = _untold(request, start, start + int(counts[row]))
        if first < last:
            before += range(int(starts[row]) + first - start, int(starts[row]) + last - start)
            targets += request.prompt_token_ids[first + 1 : last + 1]
            spans.append((row, last - first))
            num_top = max(num_top, request.params.prompt_logprobs or 0)
    if not sampled and not spans:
        return None
    return WantedReports(
        num_top=num_top,
        samples=np.array(sampled, np.int64),
        before=np.array(before, np.int64),
        targets=np.array(targets, np.int32),
        spans=tuple(spans),
    )


def take_in_reports(
    wanted: WantedReports,
    reports: Reports | None,  # None where no model runs, as in a replay
    samplers: Sequence[Request | None],
    rows: Sequence[Request | None],
) -> None:
    """Give each live request what it wanted; rows are the step's, samplers those of its samples.

    Where a sampler is None, the sample was of a draft that did not hold.
    """
    for place, number in enumerate(wanted.samples.tolist()):
        request = samplers[number]
        if reports is not None and request is not None and request.finish_reason is None:
            request.logprobs.append(reports.samples[place])
    start = 0
    for row, count in wanted.spans:
        told = rows[row]
        if told is not None and told.finish_reason is None:
            if reports is not None:
                told.prompt_logprobs += reports.prompts[start : start + count]
            told.num_reported += count
        start += count


def _untold(request: Request, start: int, stop: int) -> tuple[int, int]:
    """The positions of that stretch at which a token of the prompt comes next that is wanted and not told."""
    if request.params.prompt_logprobs is None:
        return start, start
    return max(start, request.num_reported), min(stop, len(request.prompt_token_ids) - 1)
