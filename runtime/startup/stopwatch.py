"""Where the seconds of a start go: what the caller waits for, and what is done meanwhile."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

STAGES = (
    *("imports", "config", "kernels", "weights", "tokenizer", "capture", "compile", "load"),
    "drafter",  # a model or head that drafts: compiled or loaded, and read
    *("autotune", "kv_cache", "cuda_graphs"),  # kv_cache: what a trial of the largest step leaves, allocated
)
Result = TypeVar("Result")


@dataclass(slots=True)
class Stopwatch:
    """Seconds of each stage of the start, as the caller waited for them: they add up to the whole.

    What is read meanwhile is `overlapped`: its seconds are not the caller's, but for those spent waiting.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    overlapped: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        """Book the time since the last lap to a stage."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now

    def overlap(self, name: str, work: Callable[[], Result]) -> Result:
        """Do work on another thread, keep its seconds under a name, and return what it returns."""
        started = time.perf_counter()
        try:
            return work()
        finally:
            self.overlapped[name] = time.perf_counter() - started

    def split(self, stage: str, parts: Mapping[str, float]) -> None:
        """Book parts of a stage under their own names."""
        for part, seconds in parts.items():
            if part != stage:
                self.seconds[part] = seconds
                self.seconds[stage] -= seconds

    def take_over(self, others: Mapping[str, float]) -> None:
        """Book the time since the last lap as another process has; what that did not book are its imports."""
        now = time.perf_counter()
        for stage, seconds in others.items():
            self.seconds[stage] += seconds
        self.seconds["imports"] += now - self._last - sum(others.values())
        self._last = now
