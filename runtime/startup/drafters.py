"""Drafters by what a runtime's settings ask for."""

from ...common.errors import UnsupportedError
from ..worker.drafter import Drafter
from ..worker.input_batch import InputBatch
from .resolved import ResolvedRuntime


def new_drafter(resolved: ResolvedRuntime, input_batch: InputBatch) -> Drafter | None:
    """Who drafts for this runtime; None where nobody does.

    UnsupportedError for one that this model cannot have.
    """
    asked = resolved.config.speculative
    if asked is None:
        return None
    raise UnsupportedError(f"speculative is {asked}, which nothing drafts for yet; wanted None")
