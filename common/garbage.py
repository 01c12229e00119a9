"""Garbage collection while a process serves: what is there is left out of it, and it comes seldom."""

import gc

Thresholds = tuple[int, int, int]
SELDOM: Thresholds = (20_000, 20, 10)  # as gc.set_threshold() has them; 700 objects are few beside one step's


def freeze() -> Thresholds:
    """Leaves out of collections what is there now, and has them seldom; returns the thresholds before."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    return before


def unfreeze(before: Thresholds) -> None:
    """Has collections of all there is, by the thresholds that freeze() returned."""
    gc.set_threshold(*before)
    gc.unfreeze()
