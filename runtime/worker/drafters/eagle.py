"""An EAGLE head as a drafter: it goes on from the model's own states, and then from its own."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..attention import PagedAttention
from ..drafter import DraftInput
from .draft_sampler import DraftSampler
from .rows import one_a_row

HeadForward = Callable[[Tensor, Tensor, PagedAttention, Tensor], Tensor]  # ids, positions, attend, states
Map = Callable[[Tensor], Tensor]


class EagleDrafter:
    """Sees every token of the model's once, with the state of the token before it.

    A pair of a token's state and the token behind it stands at the first one's position, and says which token
    may come two after it. What drafts that did not hold left in the cache lies where the next step writes.
    """

    def __init__(
        self,
        *,
        forward: HeadForward,
        combine: Map,  # what the model hands out of each token [T, columns] -> states [T, H]
        logits: Map,  # states [n, H] -> scores [n, drafted]
        attention: PagedAttention,
        sampler: DraftSampler,
        wants_aux: tuple[int, ...],
        block_size: int,
    ) -> None:
        self.wants_aux = wants_aux
        self._forward, self._combine, self._logits = forward, combine, logits
        self._attention, self._sampler, self._block_size = attention, sampler, block_size

    def propose(self, step: DraftInput, draft_ids: Tensor) -> None:
        """See Drafter."""
        batch = step.batch
        given = self._combine((step.hidden if step.aux_hidden is None else step.aux_hidden).contiguous())
        self._attention.begin(batch)
        states = self._forward(following_ids(step), batch.positions, self._attention, given)
        if not step.num_drafts or not len(batch.sampled):
            return
        self._sampler.begin(step)
        states, positions = states.index_select(0, last_tokens(step)), step.num_computed - 1
        for number in range(step.num_drafts):
            if number:
                states = self._advance(step, draft_ids[:, number - 1], positions, states)
            draft_ids[:, number] = self._sampler.sample(self._logits(states), positions + 2)
            positions = positions + 1

    def _advance(self, step: DraftInput, drafts: Tensor, positions: Tensor, states: Tensor) -> Tensor:
        """The states behind one draft more of each row."""
        view = one_a_row(step, drafts.clamp(min=0), positions, self._block_size)
        self._attention.begin(view)
        return self._forward(view.token_ids, view.positions, self._attention, states)


def following_ids(step: DraftInput) -> Tensor:
    """The id behind each of a step's tokens, [tokens] int32: in its row, or what was sampled there.

    Behind a row that ends amid a prompt it is any id. Behind a draft that did not hold nothing stands.
    """
    batch = step.batch
    num_tokens, num_samples = len(batch.token_ids), len(batch.sampled)
    if num_samples == num_tokens:  # each is sampled behind
        return batch.sampled.clamp(min=0)
    following = torch.cat((batch.token_ids[1:], batch.token_ids.new_zeros(2)))
    if num_samples:
        places = torch.arange(num_samples, device=following.device)
        is_sample = places < step.num_samples.sum()
        where = torch.where(is_sample, batch.logits_rows, num_tokens)
        following.index_copy_(0, where.long(), batch.sampled.clamp(min=0))
    return following[:num_tokens]


def last_tokens(step: DraftInput) -> Tensor:
    """Which of a step's tokens is the last one of each row that holds, [rows]; any of rows amid a prompt."""
    batch = step.batch
    which = (step.first_samples + step.num_accepted).clamp(max=len(batch.sampled) - 1)
    return batch.logits_rows.index_select(0, which)
