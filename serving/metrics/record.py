"""What is known of one HTTP request while it is served: for Server-Timing, the access log and traces."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    FinishedRequest: TypeAlias = Any
    Generation: TypeAlias = Any
    from ...runtime.sampling_params import SamplingParams
    from .metrics import Metrics


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """One HTTP request: how it was answered, and what the engine did for it; no text of it.

    metrics: the books that tell of finished answers. Times are those of time.monotonic().
    """

    metrics: "Metrics"
    started: float = field(default_factory=time.monotonic)
    status: int | None = None
    params: "SamplingParams | None" = None
    generations: "list[Generation]" = field(default_factory=list)
    finished: "list[FinishedRequest]" = field(default_factory=list)

    def begin(self, generation: "Generation", params: "SamplingParams") -> None:
        """Notes that a prompt of the request was given to the engine, with what parameters."""
        self.params = params
        self.generations.append(generation)
        self.metrics.follow(generation.request_id, self)

    def end(self) -> None:
        """Lets go of what was noted; the request has been answered, or its client is gone."""
        for generation in self.generations:
            self.metrics.unfollow(generation.request_id)
        self.generations.clear()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all its prompts."""
        return sum(len(generation.prompt_token_ids) for generation in self.generations)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all its answers so far."""
        return sum(generation.num_output_tokens for generation in self.generations)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of its prompts that were in the prefix cache, as far as is known."""
        return sum(generation.num_cached_tokens or 0 for generation in self.generations)

    def timing(self) -> dict[str, float]:
        """Returns milliseconds of queue, prefill and decode where they are over, and of all until now.

        Of several answers the first to come through a phase counts, and in decode the last to end.
        """
        times = [request.times for request in self.finished]
        queued = _first(entry.queued for entry in times)
        scheduled = _first(entry.first_scheduled for entry in times)
        token = _first(entry.first_token for entry in times)
        ended = max((entry.finished for entry in times if entry.finished is not None), default=None)
        phases = {"queue": (queued, scheduled), "prefill": (scheduled, token), "decode": (token, ended)}
        spent = {
            name: round(max(end - start, 0.0) * 1000, 3)
            for name, (start, end) in phases.items()
            if start is not None and end is not None
        }
        return {**spent, "total": round((time.monotonic() - self.started) * 1000, 3)}

    def server_timing(self) -> str:
        """Returns the value of a Server-Timing header."""
        return ", ".join(f"{name};dur={spent}" for name, spent in self.timing().items())


def _first(times: Any) -> float | None:
    return min((entry for entry in times if entry is not None), default=None)


def record_of(connection: "HTTPConnection") -> RequestRecord:
    """Returns the record of a request that came through the middleware Observation."""
    scope: Mapping[str, Any] = connection.scope
    record: RequestRecord = scope["lamina.record"]
    return record
