"""A histogram for Prometheus: counts between fixed bounds, written without a lock by one thread."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many observations fell between which bounds, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, num_times: int = 1) -> None:
        """Takes in a value that was seen so many times."""
        self.counts[bisect_left(self.bounds, value)] += num_times
        self.sum += value * num_times

    @property
    def count(self) -> int:
        """How many values were seen."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns each bound as text with the number of values at most it; the last is +Inf."""
        names, total, pairs = [*map(str, self.bounds), "+Inf"], 0, []
        for name, count in zip(names, self.counts, strict=True):
            total += count
            pairs.append((name, float(total)))
        return pairs


def lengths_up_to(longest: int) -> list[float]:
    """Returns 1, 2, 5, 10, 20, 50 and so on up to the first that is not below the longest."""
    bounds, scale = [], 1
    while True:
        for digit in (1, 2, 5):
            bounds.append(float(digit * scale))
            if digit * scale >= longest:
                return bounds
        scale *= 10


# The bounds that dashboards made for vLLM expect, with finer ones below for small models.
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
SWAP_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
STEP_TOKENS = tuple(float(1 << power) for power in range(15))
REQUEST_TOKENS = tuple(lengths_up_to(1_000_000))
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
