"""How the tokens of a step are shared out among running requests: arrays [rows] in, arrays [rows] out."""

import numpy as np

from ..protocol.scheduler_output import Flags, Ints
from .config import SchedulerConfig


def step_budget(config: SchedulerConfig, num_rows: int, *, any_answers: bool) -> int:
    """Tokens of a step in all; fewer where it keeps someone waiting for the next token of an answer."""
    most = config.max_num_batched_tokens
    if config.max_prefill_tokens is not None:
        most = min(most, num_rows + config.max_prefill_tokens)
    beside = config.max_tokens_beside_decode
    return most if beside is None or not any_answers else min(beside, most)


def share_out(wanted: Ints, by_rank: Ints, budget: int, stuck: Flags | None) -> Ints:
    """What each row gets of a budget: first those that want one token, as answers do, then the others.

    So an answer goes on in every step, however long a prompt of better rank is. The first of all advances by
    one token at least, so that answers cannot keep it waiting either. by_rank: all rows, the first first;
    stuck: rows that cannot advance, nor can any that comes after one of them.
    """
    order = by_rank[np.argsort(wanted[by_rank] > 1, kind="stable")]
    reserved = np.zeros_like(wanted)
    reserved[by_rank[0]] = stuck is None and wanted[by_rank[0]] > 1
    return reserved + in_order(wanted - reserved, order, budget - int(reserved.sum()), stuck)


def batch_of(wanted: Ints, by_rank: Ints, budget: int, stuck: Flags | None, most_rows: int) -> Ints:
    """The same for the first so many rows that can advance, whoever is stuck before them."""
    free = wanted if stuck is None else np.where(stuck, 0, wanted)
    advancing = by_rank[free[by_rank] > 0][:most_rows]
    if not len(advancing):
        return np.zeros_like(wanted)
    counts = np.zeros_like(wanted)
    counts[advancing] = free[advancing]
    return share_out(counts, by_rank, budget, None)


def in_order(wanted: Ints, order: Ints, budget: int, stuck: Flags | None) -> Ints:
    """What each row gets of a budget where they take in this order, up to the first that is stuck."""
    ordered = wanted[order]
    if stuck is not None:
        ordered[stuck[order].argmax() :] = 0
    before = np.cumsum(ordered) - ordered
    counts = np.zeros_like(wanted)
    counts[order] = np.minimum(ordered, (budget - before).clip(0))
    return counts
