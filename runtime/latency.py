"""How long requests wait: for their first token, and from one token to the next."""

from collections import deque
from collections.abc import Sequence

from .request import Request

NUM_REMEMBERED = 1024


class Latencies:
    """The waits of the requests that ended last."""

    def __init__(self) -> None:
        self._first_token: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._between_tokens: deque[float] = deque(maxlen=NUM_REMEMBERED)

    def add(self, request: Request) -> None:
        """Take in a request that has ended; one without a token has waited for nothing that came."""
        queued, first, finished = request.times.queued, request.times.first_token, request.times.finished
        if queued is None or first is None or finished is None:
            return
        self._first_token.append(first - queued)
        if (num_more := len(request.output_token_ids) - 1) > 0:
            self._between_tokens.append((finished - first) / num_more)

    def summary(self) -> dict[str, dict[str, float | None]]:
        """Median and 95th percentile in seconds, of each request's wait and of its mean between tokens."""
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
