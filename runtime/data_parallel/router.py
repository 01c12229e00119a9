"""Which of several engines takes a request: books that know no clock, no thread and no engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from .prefixes import KnownPrefixes, block_hashes

ANSWER = 512  # the load of an answer that is written, in tokens of a prompt that take about as long
AHEAD = 8 * ANSWER  # of the least loaded engine, that a known beginning may put another one


def most_ahead(least: int) -> int:
    """Returns by how much an engine may be loaded above the least to be given what it knows the start of."""
    return max(AHEAD, least // 2)


@dataclass(slots=True)
class _Live:
    engine: int
    num_unread: int  # tokens of its prompt that the engine has not computed, as far as is known


class Router:
    """Gives requests to engines: to one that knows their beginning, unless it is too busy, else by load.

    The load of an engine is ANSWER for each request that it has, waiting or running, and the tokens of
    prompts that it has not computed. Equal requests in an equal order are given alike: of engines as good as
    each other the one that was given the fewest requests so far, then the first, takes it.
    """

    def __init__(self, num_engines: int, *, block_size: int, num_blocks: int) -> None:
        """block_size, num_blocks: of an engine's prefix cache; 0 blocks where there is none."""
        self._block_size, self._num_blocks = block_size, num_blocks
        self._known = [KnownPrefixes(num_blocks) for _ in range(num_engines)]
        self._live: dict[str, _Live] = {}
        self.loads = [0] * num_engines
        self.num_live = [0] * num_engines
        self.num_given = [0] * num_engines  # since the start
        self.num_given_by_prefix = [0] * num_engines  # of these, to an engine that knew their beginning

    def give(
        self, request_ids: Sequence[str], prompt_token_ids: Sequence[int], salt: str, usable: Sequence[int]
    ) -> int:
        """Returns the engine that takes requests of one prompt, among those that are usable: at least one.

        salt: parts the prefix cache, as EngineRequest.block_salt.
        """
        hashes = block_hashes(prompt_token_ids, salt, self._block_size) if self._num_blocks else []
        matches = {engine: self._known[engine].match(hashes) for engine in usable}
        least = min(self.loads[engine] for engine in usable)
        free = [engine for engine in usable if self.loads[engine] <= least + most_ahead(least)]
        chosen = min(free, key=lambda e: (-matches[e], self.loads[e], self.num_given[e], e))
        num_unread = len(prompt_token_ids) - matches[chosen] * self._block_size
        for request_id in request_ids:
            self._add(request_id, chosen, num_unread)
            num_unread = 0  # answers to one prompt share its blocks
        self._known[chosen].note(hashes)
        self.num_given_by_prefix[chosen] += len(request_ids) if matches[chosen] else 0
        return chosen

    def engine_of(self, request_id: str) -> int | None:
        """Returns the engine that has a request, None where it has ended."""
        live = self._live.get(request_id)
        return None if live is None else live.engine

    def began(self, request_id: str) -> None:
        """Its first token came: its prompt is computed."""
        live = self._live.get(request_id)
        if live is not None and live.num_unread:
            self.loads[live.engine] -= live.num_unread
            live.num_unread = 0

    def ended(self, request_id: str) -> None:
        """It is no load any more; one that is not live is passed over."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self.loads[live.engine] -= ANSWER + live.num_unread
            self.num_live[live.engine] -= 1

    def lose(self, engine: int) -> list[str]:
        """Returns the live requests of an engine, which have ended with it, and all that it knew."""
        lost = [request_id for request_id, live in self._live.items() if live.engine == engine]
        for request_id in lost:
            self.ended(request_id)
        self._known[engine] = KnownPrefixes(self._num_blocks)
        return lost

    def forget_prefixes(self) -> None:
        """The prefix caches of all engines are empty."""
        self._known = [KnownPrefixes(self._num_blocks) for _ in self._known]

    def _add(self, request_id: str, engine: int, num_unread: int) -> None:
        self._live[request_id] = _Live(engine, num_unread)
        self.loads[engine] += ANSWER + num_unread
        self.num_live[engine] += 1
        self.num_given[engine] += 1
