"""Drafts out of a request's own tokens: what followed where its last ones came before."""

import torch
from torch import Tensor

from .... import custom_ops
from ..drafter import DraftInput


class NGramDrafter:
    """A Drafter that keeps the token of each slot of the KV cache, so that block tables lead to them.

    Tokens go where their keys and values go. So those of a prefix-cache hit are there, a request may have
    any row, and what did not hold is overwritten as its keys and values are.
    """

    wants_aux: tuple[int, ...] = ()

    def __init__(
        self, *, num_blocks: int, block_size: int, device: torch.device, min_ngram: int, max_ngram: int
    ) -> None:
        """num_blocks: of the pool, the null block included, which takes the tokens of padding."""
        self._tokens = torch.full((num_blocks, block_size), -1, dtype=torch.int32, device=device)
        self._ngram = min_ngram, max_ngram

    def propose(self, step: DraftInput, draft_ids: Tensor) -> None:
        """See Drafter."""
        slots = step.batch.slot_mappings[0].clamp(min=0).long()
        self._tokens.view(-1).index_copy_(0, slots, step.batch.token_ids)
        if step.num_drafts:
            tables, ends = step.batch.block_tables[0], step.num_computed
            custom_ops.propose_ngram(self._tokens, tables, ends, step.newest, *self._ngram, draft_ids)
