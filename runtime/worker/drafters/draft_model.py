"""A smaller model of the same vocabulary as a drafter."""

from torch import Tensor

from ..attention import PagedAttention
from ..drafter import DraftInput
from ..graph_runner import Forward
from .draft_sampler import DraftSampler
from .eagle import Map, following_ids, last_tokens
from .rows import one_a_row, one_further


class DraftModelDrafter:
    """Computes every token that the model computed and that holds, and then goes on from the newest."""

    wants_aux: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        forward: Forward,
        logits: Map,
        attention: PagedAttention,
        sampler: DraftSampler,
        block_size: int,
    ) -> None:
        self._forward, self._logits = forward, logits
        self._attention, self._sampler, self._block_size = attention, sampler, block_size

    def propose(self, step: DraftInput, draft_ids: Tensor) -> None:
        """See Drafter."""
        hidden = self._catch_up(step)
        if not step.num_drafts or not len(step.batch.sampled):
            return
        self._sampler.begin(step)
        positions = step.num_computed
        for number in range(step.num_drafts):
            if number:
                hidden = self._advance(step, draft_ids[:, number - 1], positions)
            draft_ids[:, number] = self._sampler.sample(self._logits(hidden), positions + 1)
            positions = positions + 1

    def _catch_up(self, step: DraftInput) -> Tensor:
        """The hidden states [rows, H] of the newest tokens, once all before them are in the cache.

        Where every token was sampled behind, the first of each row is in the cache: it was the newest.
        """
        batch = step.batch
        if len(batch.sampled) == len(batch.token_ids):
            view = one_further(step, following_ids(step), self._block_size)
            self._attention.begin(view)
            hidden = self._forward(view.token_ids, view.positions, self._attention)
            return hidden.index_select(0, last_tokens(step))
        self._attention.begin(batch)
        self._forward(batch.token_ids, batch.positions, self._attention)
        return self._advance(step, step.newest, step.num_computed)

    def _advance(self, step: DraftInput, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The hidden states [rows, H] of one token more of each row."""
        view = one_a_row(step, token_ids.clamp(min=0), positions, self._block_size)
        self._attention.begin(view)
        return self._forward(view.token_ids, view.positions, self._attention)
