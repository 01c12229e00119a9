"""lamina::keep_typical on CPU: row by row, and only the rows that want it."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .._shared.call_capture import uncapturable
from .._shared.registry import Provider
from ..sample.reference import gaps_below, largest_logits

CANDIDATES = 4096  # most typical tokens looked at first

Row = NDArray[np.float32]


def keep_typical(logits: Tensor, temperature: Tensor, typical_p: Tensor) -> None:
    """The op, as op.py states it."""
    for row in ((temperature > 0) & (typical_p < 1)).nonzero().flatten().tolist():
        own = logits[row : row + 1]
        gaps: Row = gaps_below(largest_logits(own), own, temperature[row : row + 1])[0].numpy()
        if gaps.min() == 0:  # not so where a logit is NaN or infinite, or every one is -inf
            scores: Row = own[0].numpy()
            np.putmask(scores, ~_is_typical(gaps, float(typical_p[row])), -np.inf)


def _is_typical(gaps: Row, typical_p: float) -> NDArray[np.bool_]:
    odds = np.exp(-gaps).astype(np.float64)
    mass = odds.sum()
    has_part = odds > 0
    mean = np.float32((odds[has_part] * gaps[has_part]).sum() / mass)
    distances = np.abs(gaps - mean)
    is_typical: NDArray[np.bool_] = distances <= _farthest(distances, odds, typical_p * mass)
    return is_typical


def _farthest(distances: Row, odds: NDArray[np.float64], goal: float) -> np.float32:
    """The distance at which the running sum of odds, the nearest first, reaches the goal."""
    vocab = len(distances)
    count = min(vocab, CANDIDATES)
    while True:
        order = np.argpartition(distances, count - 1)[:count] if count < vocab else np.arange(vocab)
        order = order[distances[order].argsort()]
        num_short = int(np.searchsorted(odds[order].cumsum(), goal))
        if num_short < count or count == vocab:
            farthest: np.float32 = distances[order[min(num_short, count - 1)]]
            return farthest
        count = min(vocab, 8 * count)


def load() -> Callable[..., None]:
    """The op's function."""
    return uncapturable(keep_typical, "NumPy computes what keep_typical does")


PROVIDER = Provider(name="numpy", load=load, devices=frozenset({"cpu"}))
