"""How long requests wait: for their first token, and from one token to the next."""

from collections import deque
from collections.abc import Sequence

from ..protocol.engine_output import Timeline

NUM_REMEMBERED = 1024


class Latencies:
    """The waits of the requests that ended last."""

    def __init__(self) -> None:
        self._first_token: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._between_tokens: deque[float] = deque(maxlen=NUM_REMEMBERED)

    def add(self, times: Timeline, num_tokens: int) -> None:
        """Takes in a request that has ended; one without a token is left out."""
        if times.queued is None or times.first_token is None or times.finished is None:
            return
        self._first_token.append(times.first_token - times.queued)
        if num_tokens > 1:
            self._between_tokens.append((times.finished - times.first_token) / (num_tokens - 1))

    def summary(self) -> dict[str, dict[str, float | None]]:
        """Returns median and 95th percentile in seconds, of the wait for a token and of that between two."""
        return {
            "first_token": _percentiles(self._first_token),
            "between_tokens": _percentiles(self._between_tokens),
        }


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": None, "p95": None}
    last = len(ordered) - 1
    return {"p50": ordered[round(0.5 * last)], "p95": ordered[round(0.95 * last)]}
