"""When a model makes room for another: a pure function of where all of them stand, and of the time."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelState:
    """Where one model stands. Times are seconds of one clock."""

    resident_since: float | None = None
    """When it was last woken; None while it sleeps."""
    left_at: float = float("-inf")
    """When it was last put to sleep."""
    waiting_since: float | None = None
    """When the request came that has waited longest for its turn; None where none waits."""
    num_running: int = 0
    """Sequences that were admitted and have not ended."""
    draining_since: float | None = None
    """Since when its new requests wait, so that it can be put to sleep once the running ones have ended."""
    is_available: bool = True
    """Whether it may be woken: nobody has put it to sleep by hand, and its engine is alive."""

    @property
    def asks_since(self) -> float | None:
        """Since when it asks to be woken; None where it does not.

        What waited through a residence counts from its end, so that no model's old requests keep another's
        waiting for ever.
        """
        if self.resident_since is not None or not self.is_available:
            return None
        if self.waiting_since is not None:
            return max(self.waiting_since, self.left_at)
        return self.left_at if self.num_running else None

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return self.num_running > 0 or self.waiting_since is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """Nothing is to be done before something changes, or this time comes."""

    until: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """From now on this model's new requests wait."""

    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRunning:
    """What still runs of a model that is drained has had its time: it is ended."""

    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """This model need not be drained: its requests are taken again."""

    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """One model is put to sleep, where it is given, and one woken."""

    out: str | None
    into: str


Action = Rest | Drain | EndRunning | Resume | Swap


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapPolicy:
    """How many models are resident together, and for how many seconds each of them stays at least.

    drain_timeout: seconds that what runs of one may take once it is to make room; None: as long as it takes.
    """

    max_resident: int = 1
    min_residence: float = 0.0
    drain_timeout: float | None = None

    def decide(self, models: Mapping[str, ModelState], now: float) -> Action:
        """Returns what is to be done now.

        Of the models that ask, the one that has asked longest is woken. A model is put to sleep only for
        one that asks, after its minimum residence, with nothing running: one without work before others,
        then the one that was woken first.
        """
        resident = {name: model for name, model in models.items() if model.resident_since is not None}
        draining = next((name for name, model in resident.items() if model.draining_since is not None), None)
        into = next(iter(asking(models)), None)
        if into is None or len(resident) < self.max_resident:
            if draining is not None:
                return Resume(model=draining)
            return Rest() if into is None else Swap(out=None, into=into)
        if draining is None:
            return self._drain(resident, now)
        if not resident[draining].num_running:
            return Swap(out=draining, into=into)
        return self._await_running(draining, resident[draining], now)

    def seconds_until(
        self, name: str, models: Mapping[str, ModelState], now: float, swap_seconds: Mapping[str, float]
    ) -> float | None:
        """Returns in how many seconds a model takes requests that come now, at the soonest.

        As if nothing ran of those that make room for it. swap_seconds: what it takes to wake each. None
        where nobody knows: the model is put to sleep by hand, or cannot be woken.
        """
        own = models[name]
        if own.resident_since is not None and own.draining_since is None:
            return 0.0
        if not own.is_available:
            return None
        resident = [model for model in models.values() if model.resident_since is not None]
        leave_at = [now] * (self.max_resident - len(resident)) + [
            self._leaves_at(each, now) for each in resident
        ]
        heapq.heapify(leave_at)
        order = asking(models)
        for other in order[: order.index(name)] if name in order else order:
            heapq.heappush(leave_at, heapq.heappop(leave_at) + swap_seconds[other] + self.min_residence)
        return heapq.heappop(leave_at) + swap_seconds[name] - now

    def _leaves_at(self, model: ModelState, now: float) -> float:
        if model.draining_since is not None:
            return now
        return max(now, (model.resident_since or 0.0) + self.min_residence)

    def _await_running(self, name: str, model: ModelState, now: float) -> EndRunning | Rest:
        if self.drain_timeout is None or model.draining_since is None:
            return Rest()
        until = model.draining_since + self.drain_timeout
        return EndRunning(model=name) if until <= now else Rest(until=until)

    def _drain(self, resident: Mapping[str, ModelState], now: float) -> Drain | Rest:
        ends = {name: (model.resident_since or 0.0) + self.min_residence for name, model in resident.items()}
        over = [name for name in resident if ends[name] <= now]
        if not over:
            return Rest(until=min(ends.values()))
        return Drain(model=min(over, key=lambda name: (resident[name].has_work, ends[name])))


def asking(models: Mapping[str, ModelState]) -> list[str]:
    """Returns the models that ask to be woken, the one that has asked longest first, then who left first."""
    found = [
        (since, model.left_at, name)
        for name, model in models.items()
        if (since := model.asks_since) is not None
    ]
    return [name for *_, name in sorted(found)]
