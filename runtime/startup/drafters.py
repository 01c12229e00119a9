"""Drafters that are no models, by what a runtime's settings ask for."""

import torch

from ...custom_ops._shared import registry
from ..speculation.config import NGram
from ..worker.drafter import Drafter
from ..worker.drafters.ngram import NGramDrafter
from . import memory
from .resolved import ResolvedRuntime


def new_drafter(resolved: ResolvedRuntime) -> Drafter | None:
    """Who drafts in this process, out of its requests' own tokens; None where nobody does."""
    asked, stage = resolved.config.speculative, resolved.stage
    if not isinstance(asked, NGram) or not (stage is None or stage.is_last):
        return None
    registry.select("propose_ngram", device=resolved.device, dtype=torch.int32)  # built before any request
    return NGramDrafter(
        num_blocks=memory.pool_blocks(resolved.num_kv_blocks, memory.groups_of(resolved)),
        block_size=resolved.block_size,
        device=resolved.device,
        min_ngram=asked.min_ngram,
        max_ngram=asked.max_ngram,
    )
