"""One call of several engines: whose replies are there, and what they come to."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...common.errors import LaminaError
from ..protocol.core_messages import Call, Reply

OF_ONE = ("explain", "explain_html", "count_whole")  # what any engine can answer for all
SUMMED = (
    *("blocks", "requests", "preemptions", "forced_tokens", "speculation", "swap", "prefix_cache"),
    "cuda_graphs",
)  # figures that engines have together


class Gathering:
    """A call that several engines are to answer."""

    def __init__(self, call: Call, engines: Iterable[int]) -> None:
        self.call = call
        self.waiting = {*engines}
        self.replies: dict[int, Reply] = {}

    @property
    def is_whole(self) -> bool:
        """Whether nobody is left to wait for."""
        return not self.waiting

    def take(self, engine: int, reply: Reply) -> None:
        """An engine's reply."""
        self.waiting.discard(engine)
        self.replies[engine] = reply

    def leave(self, engine: int, error: LaminaError) -> None:
        """An engine is lost: what the others have done holds; without any it is an error."""
        if engine in self.waiting:
            self.waiting.discard(engine)
            if not self.waiting and not self.replies:
                self.replies[engine] = Reply(number=self.call.number, error=error)

    @property
    def failed(self) -> list[int]:
        """The engines that answered by an error."""
        return [engine for engine, reply in self.replies.items() if reply.error is not None]

    def reply(self) -> Reply:
        """Returns the first engine's error if there is any, else what the values come to."""
        replies = {engine: self.replies[engine] for engine in sorted(self.replies)}
        error = next((reply.error for reply in replies.values() if reply.error is not None), None)
        if error is not None:
            return Reply(number=self.call.number, error=error)
        merge = MERGES.get(self.call.method, _first) if self.call.engine is None else _first
        values = {engine: reply.value for engine, reply in replies.items()}
        return Reply(number=self.call.number, value=merge(values))


def _first(values: Mapping[int, Any]) -> Any:
    return next(iter(values.values()))


def merged_stats(values: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the first one's figures with the counts of all, and in "engines" each one's by its number."""
    first = _first(values)
    together = {name: _sum([stats[name] for stats in values.values()]) for name in SUMMED}
    return {**first, **together, "engines": {str(engine): stats for engine, stats in values.items()}}


def _sum(values: list[Any]) -> Any:
    """The sum of numbers, of mappings by their keys, and of lists by their places; of others the first."""
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _sum([value[name] for value in values if name in value]) for name in first}
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(values)
    if isinstance(first, list) and all(isinstance(each, (int, float)) for value in values for each in value):
        longest = max(map(len, values))
        return [sum(value[place] for value in values if place < len(value)) for place in range(longest)]
    return first


def merged_fingerprints(values: Mapping[int, str]) -> str:
    """Returns the fingerprint of all where it is the same, else one that stands for these."""
    different = sorted({*values.values()})
    if len(different) == 1:
        return different[0]
    return f"fp_{hashlib.sha256(' '.join(different).encode()).hexdigest()[:24]}"


MERGES: Mapping[str, Callable[[Mapping[int, Any]], Any]] = {
    "stats": merged_stats,
    "is_sleeping": lambda values: all(values.values()),
    "fingerprint": merged_fingerprints,
}
