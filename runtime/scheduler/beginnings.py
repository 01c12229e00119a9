"""Requests that have just been admitted: their prefix-cache hits, and when their first token came."""

from collections.abc import Callable

from .request import Request


class Beginnings:
    """Counts prefix-cache hits once they are certain, and notes the time of each request's first token.

    A step that fails takes back the hits of those that it admitted, so they are counted when it is over.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Of those whose first step is not over: the step that admitted each, tokens looked for, hits.
        self._first_steps: dict[Request, tuple[int, int, int]] = {}
        self._without_token: dict[Request, None] = {}  # admitted, without a token that the host has read
        self.num_queried_tokens = 0  # of prompts, looked for in the prefix cache
        self.num_hit_tokens = 0  # of them, hits

    def admit(self, request: Request, step: int, *, num_queried: int, num_hits: int) -> None:
        """A step starts a request, which had these hits of the tokens looked for."""
        request.start(num_hits, self._clock())
        if not request.output_token_ids:
            self._without_token[request] = None
        if not request.has_begun:
            self._first_steps[request] = step, num_queried, num_hits

    def step_over(self, step: int) -> None:
        """Nothing can undo that step any more: what it admitted has begun."""
        if not self._first_steps:
            return
        begun = [request for request, (first, *_) in self._first_steps.items() if first == step]
        for request in begun:
            _, num_queried, num_hits = self._first_steps.pop(request)
            request.begin()
            self.num_queried_tokens += num_queried
            self.num_hit_tokens += num_hits

    def note_first_tokens(self) -> None:
        """Note the time of those that have their first token now."""
        for request in [*self._without_token]:
            if request.output_token_ids:
                request.note_first_token(self._clock())
                del self._without_token[request]

    def undo(self, step: int) -> None:
        """That step and later ones never were."""
        undone = [request for request, (first, *_) in self._first_steps.items() if first >= step]
        for request in undone:
            del self._first_steps[request]
            request.undo_start()

    def discard(self, request: Request) -> None:
        """A request has ended, with a token or without."""
        self._without_token.pop(request, None)

    def clear(self) -> None:
        """Nobody is beginning."""
        self._first_steps.clear()
        self._without_token.clear()

    def check(self, running: set[Request]) -> None:
        """Whoever runs without a token is watched, and nobody who has one or has ended; for tests."""
        assert {r for r in running if not r.output_token_ids} <= self._without_token.keys()
        assert not any(request.output_token_ids or request.finish_reason for request in self._without_token)
