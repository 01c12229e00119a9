"""The books of a server: what it answered and how long that took, in plain counts that a scrape reads."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from . import histogram
from .histogram import Histogram

if TYPE_CHECKING:
    from ...runtime.engine.async_client import FinishedRequest
    from ...runtime.protocol.engine_output import EngineOutput

REFUSALS = (  # codes of errors that keep a request out
    *("queue_full", "requests_limit_exceeded", "tokens_limit_exceeded", "concurrency_limit_exceeded"),
    *("starting", "draining", "failed", "invalid_api_key", "route_not_allowed", "model_not_allowed"),
    *("request_too_large", "too_many_sequences", "context_length_exceeded", "other"),
)
REFUSED = frozenset((401, 403, 413, 429, 503))  # statuses of errors that do, whatever their code
LAG_INTERVAL = 0.5  # seconds between two looks at how late the event loop is


class Metrics:
    """What was counted since the server started; it is told by the engine's client and by the middleware.

    One thread, the event loop's, writes and reads it.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.finished_by_reason: Counter[str] = Counter(
            dict.fromkeys(("stop", "length", "abort", "error"), 0)
        )
        self.refused_by_reason: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        self.http_requests: Counter[tuple[str, str]] = Counter()  # by route template and status
        self.first_token = Histogram(histogram.FIRST_TOKEN_SECONDS)
        self.between_tokens = Histogram(histogram.BETWEEN_TOKENS_SECONDS)
        self.per_token = Histogram(histogram.BETWEEN_TOKENS_SECONDS)  # one mean an answer
        self.whole = Histogram(histogram.REQUEST_SECONDS)
        self.queue = Histogram(histogram.REQUEST_SECONDS)
        self.prefill = Histogram(histogram.REQUEST_SECONDS)
        self.decode = Histogram(histogram.REQUEST_SECONDS)
        self.inference = Histogram(histogram.REQUEST_SECONDS)
        self.prompt_lengths = Histogram(histogram.REQUEST_TOKENS)
        self.output_lengths = Histogram(histogram.REQUEST_TOKENS)
        self.max_tokens = Histogram(histogram.REQUEST_TOKENS)
        self.num_answers = Histogram(histogram.COUNTS)
        self.step_tokens = Histogram(histogram.STEP_TOKENS)
        self.loop_lag = Histogram(histogram.LAG_SECONDS)
        self.is_resident = False  # of several models: whether this one is awake
        self.swap = Histogram(histogram.SWAP_SECONDS)
        self.num_failed_swaps = 0
        self._live: dict[str, list[float]] = {}  # by the core's id: tokens so far, and when the last one came

    # What the engine's client tells, as its EngineListener.

    def outputs(self, outputs: "Sequence[EngineOutput]", now: float) -> None:
        """Takes in a step's outputs that arrived now, by time.monotonic()."""
        live, num_all = self._live, 0
        gaps: dict[float, int] = {}
        for output in outputs:
            end = output.num_before + len(output.new_token_ids)
            entry = live.get(output.request_id)
            if entry is None:
                num_all += end
                live[output.request_id] = [end, now]
            elif end > entry[0]:
                num_new = int(end - entry[0])
                num_all += num_new
                gap = (now - entry[1]) / num_new
                gaps[gap] = gaps.get(gap, 0) + num_new  # nearly all came with the same step before
                entry[0], entry[1] = end, now
            if output.finish is not None:
                live.pop(output.request_id, None)
        for gap, num_times in gaps.items():
            self.between_tokens.observe(gap, num_times)
        if num_all:
            self.num_generated_tokens += num_all
            self.step_tokens.observe(num_all)

    def finished(self, request: "FinishedRequest") -> None:
        """Takes in an answer that has ended, whichever way."""
        self.finished_by_reason["error" if request.error is not None else str(request.finish_reason)] += 1
        self._count_lengths(request)
        self._time_phases(request)

    def _count_lengths(self, request: "FinishedRequest") -> None:
        self.output_lengths.observe(request.num_output_tokens)
        if request.index:  # all answers to a prompt share it
            return
        self.num_prompt_tokens += request.num_prompt_tokens
        self.prompt_lengths.observe(request.num_prompt_tokens)
        self.num_answers.observe(request.n)
        if request.max_tokens is not None:
            self.max_tokens.observe(request.max_tokens)

    def _time_phases(self, request: "FinishedRequest") -> None:
        times = request.times
        for seen, start, end in (
            (self.queue, times.queued, times.first_scheduled),
            (self.prefill, times.first_scheduled, times.first_token),
            (self.first_token, times.queued, times.first_token),
            (self.decode, times.first_token, times.finished),
            (self.inference, times.first_scheduled, times.finished),
            (self.whole, times.queued, times.finished),
        ):
            if start is not None and end is not None:
                seen.observe(max(end - start, 0.0))
        if times.first_token is not None and times.finished is not None and request.num_output_tokens > 1:
            self.per_token.observe((times.finished - times.first_token) / (request.num_output_tokens - 1))

    # What the server tells.

    def answered(self, route: str, status: int, code: str | None = None) -> None:
        """Counts a request by its route's template, never its path, and by status and error code."""
        self.http_requests[route, str(status)] += 1
        if code in REFUSALS:
            self.refused_by_reason[code] += 1
        elif status in REFUSED:
            self.refused_by_reason["other"] += 1

    async def watch_loop(self) -> NoReturn:
        """Notes how late the event loop is, until it is cancelled."""
        while True:
            due = time.monotonic() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.loop_lag.observe(max(time.monotonic() - due, 0.0))
