"""What is known of one HTTP request while it is served: for Server-Timing, the log of requests and traces."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from ...runtime.engine.generation import Generation
    from ...runtime.sampling_params import SamplingParams


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """One HTTP request: how it was answered, and what the engine did for it.

    Times are those of time.monotonic().
    """

    started: float = field(default_factory=time.monotonic)
    status: int | None = None  # None until the answer begins
    code: str | None = None  # of the error that it was answered
    model: str | None = None  # the name that the client asked by
    params: "SamplingParams | None" = None
    generations: "list[Generation]" = field(default_factory=list)  # one a prompt

    def begin(self, generation: "Generation", params: "SamplingParams", model: str) -> None:
        """Notes that a prompt of the request was given to the engine, and how it was asked for."""
        self.params, self.model = params, model
        self.generations.append(generation)

    @property
    def ends(self) -> list[str]:
        """Why each answer that has ended did so, prompt by prompt: a finish reason, or "error"."""
        return [end for generation in self.generations for end in generation.ends]

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

    @property
    def engines(self) -> list[int]:
        """The engines that have its prompts, where there are several."""
        return sorted({each.engine for each in self.generations if each.engine is not None})

    def phases(self) -> dict[str, tuple[float, float]]:
        """Returns when receive, queue, prefill and decode began and ended, those that are over.

        The first lasts until the engine has the request. Of several answers the first to come through a phase
        counts, and in decode the last to end.
        """
        times = [timeline for generation in self.generations for timeline in generation.timelines]
        queued = _first(entry.queued for entry in times)
        scheduled = _first(entry.first_scheduled for entry in times)
        token = _first(entry.first_token for entry in times)
        ended = max((entry.finished for entry in times if entry.finished is not None), default=None)
        found = {
            "receive": (self.started, queued),
            "queue": (queued, scheduled),
            "prefill": (scheduled, token),
            "decode": (token, ended),
        }
        return {
            name: (start, max(start, end))
            for name, (start, end) in found.items()
            if start is not None and end is not None
        }

    def timing(self) -> dict[str, float]:
        """Returns milliseconds of each phase that is over, and "total" of all until now."""
        spent = {name: end - start for name, (start, end) in self.phases().items()}
        spent["total"] = time.monotonic() - self.started
        return {name: round(seconds * 1000, 3) for name, seconds in spent.items()}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns Server-Timing where the engine is done, before which a stream begins, and who has it.

        The latter is X-Lamina-Engine, where there are several engines.
        """
        found = []
        if self.engines:
            found.append((b"x-lamina-engine", ",".join(map(str, self.engines)).encode()))
        if self.generations and all(generation.is_over for generation in self.generations):
            value = ", ".join(f"{name};dur={spent}" for name, spent in self.timing().items())
            found.append((b"server-timing", value.encode()))
        return found


def _first(times: Iterable[float | None]) -> float | None:
    return min((entry for entry in times if entry is not None), default=None)


def record_of(connection: "HTTPConnection") -> RequestRecord:
    """Returns the record of a request; every one that came through the middleware Observation has it."""
    record: RequestRecord = connection.scope["lamina.record"]
    return record
