"""When a model makes room for another: a pure function of where all of them stand, and of the time."""

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
    is_draining: bool = False
    """Whether its new requests wait, so that it can be put to sleep once the running ones have ended."""
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
class Resume:
    """This model need not be drained: its requests are taken again."""

    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """One model is put to sleep, where it is given, and one woken."""

    out: str | None
    into: str


Action = Rest | Drain | Resume | Swap


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapPolicy:
    """How many models are resident together, and for how many seconds each of them stays at least."""

    max_resident: int = 1
    min_residence: float = 0.0

    def decide(self, models: Mapping[str, ModelState], now: float) -> Action:
        """Returns what is to be done now.

        Of the models that ask, the one that has asked longest is woken. A model is put to sleep only for
        one that asks, after its minimum residence, with nothing running: one without work before others,
        then the one that was woken first.
        """
        resident = {name: model for name, model in models.items() if model.resident_since is not None}
        draining = next((name for name, model in resident.items() if model.is_draining), None)
        into = longest_asking(models)
        if into is None or len(resident) < self.max_resident:
            if draining is not None:
                return Resume(model=draining)
            return Rest() if into is None else Swap(out=None, into=into)
        if draining is None:
            return self._drain(resident, now)
        return Rest() if resident[draining].num_running else Swap(out=draining, into=into)

    def _drain(self, resident: Mapping[str, ModelState], now: float) -> Drain | Rest:
        ends = {name: (model.resident_since or 0.0) + self.min_residence for name, model in resident.items()}
        over = [name for name in resident if ends[name] <= now]
        if not over:
            return Rest(until=min(ends.values()))
        return Drain(model=min(over, key=lambda name: (resident[name].has_work, ends[name])))


def longest_asking(models: Mapping[str, ModelState]) -> str | None:
    """Returns the model that has asked longest to be woken, of several the one that left first, if any."""
    asking = [
        (since, model.left_at, name)
        for name, model in models.items()
        if (since := model.asks_since) is not None
    ]
    return min(asking)[-1] if asking else None
