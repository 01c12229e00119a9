"""What a key may still use: buckets that refill by the minute, and how many of its requests run."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ApiError

Clock = Callable[[], float]  # seconds, as time.monotonic gives them


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one key may use; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


class Bucket:
    """Full at first, it refills evenly in a minute. What is known only afterwards may overdraw it."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._as_of = now

    def level(self, now: float) -> float:
        """Returns what is in it: below 0 where it is overdrawn."""
        refilled = self._level + (now - self._as_of) * self.per_minute / 60
        return min(refilled, float(self.per_minute))

    def wait(self, amount: float, now: float) -> float:
        """Returns the seconds until so much may be taken; more than it ever holds may be once it is full."""
        missing = min(amount, self.per_minute) - self.level(now)
        return max(missing, 0.0) * 60 / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """Takes so much, or gives it back where the amount is below 0."""
        self._level, self._as_of = self.level(now) - amount, now


class Meter:
    """The use of one key so far; it outlives a change of the key's limits."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self.limits = limits
        self.num_running = 0
        self._clock = clock
        self._requests = _bucket(limits.requests_per_minute, clock())
        self._tokens = _bucket(limits.tokens_per_minute, clock())

    def adopt(self, limits: Limits) -> None:
        """Goes on under other limits; only a bucket whose limit is another starts anew, full."""
        now = self._clock()
        if limits.requests_per_minute != self.limits.requests_per_minute:
            self._requests = _bucket(limits.requests_per_minute, now)
        if limits.tokens_per_minute != self.limits.tokens_per_minute:
            self._tokens = _bucket(limits.tokens_per_minute, now)
        self.limits = limits

    def count_request(self) -> None:
        """Counts one that was asked; ApiError 429 where the minute has no more."""
        now = self._clock()
        if self._requests is None:
            return
        if wait := self._requests.wait(1, now):
            raise self._refusal(f"{self.limits.requests_per_minute} requests a minute", "requests", wait)
        self._requests.take(1, now)

    def start(self, num_tokens: int) -> None:
        """Counts a request that runs from now on, and its prompts' tokens; ApiError 429 over a limit."""
        limits, now = self.limits, self._clock()
        if limits.max_concurrent is not None and self.num_running >= limits.max_concurrent:
            raise self._refusal(f"{limits.max_concurrent} requests at a time", "concurrency", 1.0)
        if self._tokens is not None and (wait := self._tokens.wait(num_tokens, now)):
            raise self._refusal(f"{limits.tokens_per_minute} tokens a minute", "tokens", wait)
        self.num_running += 1
        self.use_tokens(num_tokens)

    def end(self, num_tokens: int) -> None:
        """Counts a request that runs no more; below 0 gives tokens back that were never computed."""
        self.num_running -= 1
        self.use_tokens(num_tokens)

    def use_tokens(self, num_tokens: int) -> None:
        """Takes tokens from the minute's."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

    def headers(self) -> dict[str, str]:
        """Returns x-ratelimit-* as OpenAI names them, for the limits that there are."""
        now = self._clock()
        headers: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(int(bucket.level(now)), 0))
                headers[f"x-ratelimit-reset-{name}"] = spoken(bucket.wait(bucket.per_minute, now))
        return headers

    def _refusal(self, limit: str, kind: str, wait: float) -> ApiError:
        message = f"this key may use {limit}; try again in {spoken(wait)}"
        headers = {**self.headers(), **retry_after(wait)}
        return ApiError(status=429, message=message, code=f"{kind}_limit_exceeded", headers=headers)


def retry_after(seconds: float) -> dict[str, str]:
    """Returns the header Retry-After in whole seconds, at least 1."""
    return {"Retry-After": str(max(math.ceil(seconds), 1))}


def spoken(seconds: float) -> str:
    """Returns a time as OpenAI's headers write it: 20ms, 12s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now)
