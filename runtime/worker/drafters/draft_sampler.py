"""Samples a drafter's tokens with the noise of the model that it drafts for, so that both mostly agree."""

import torch
from torch import Tensor

from ..drafter import NO_DRAFT, DraftInput
from ..sampler import SamplingRows, sample


class DraftSampler:
    """Scores of a drafter to ids of the model.

    The noise of a token depends on the request's seed, its position and its id, as the model's own: where
    both have the same distribution, both draw the same token. Penalties, banned ids and forms of answers are
    left to the model.
    """

    def __init__(
        self,
        *,
        num_valid_ids: int,
        vocab_size: int,
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
        target_ids: Tensor | None = None,
    ) -> None:
        """target_ids: the model's id of each of the drafter's, int64 [drafted]; None where they are equal."""
        self._num_valid_ids = num_valid_ids
        self._target_ids = None if target_ids is None else target_ids.to(device)
        if target_ids is not None:  # ids that are not drafted have no odds; the others are written anew
            shape = (max_num_seqs, vocab_size)
            self._scores = torch.full(shape, float("-inf"), dtype=dtype, device=device)

    def begin(self, step: DraftInput) -> None:
        """Sample from now on with the parameters of this step's rows."""
        batch, last = step.batch, len(step.batch.sampled) - 1
        first = step.first_samples.clamp(max=last)
        self._is_sampling = step.is_sampling
        self._parameters = [
            values.index_select(0, first)
            for values in (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds)
        ]

    def sample(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The model's ids [rows] int32 of tokens at these positions, NO_DRAFT of rows without any.

        logits [rows, drafted], positions [rows] int32.
        """
        temperature, top_k, top_p, min_p, seeds = self._parameters
        rows = SamplingRows(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=seeds,
            positions=positions.long(),
            num_valid_ids=min(self._num_valid_ids, self._width(logits)),
        )
        return torch.where(self._is_sampling, sample(self._widened(logits), rows), NO_DRAFT)

    def _width(self, logits: Tensor) -> int:
        return int(logits.shape[1] if self._target_ids is None else self._scores.shape[1])

    def _widened(self, logits: Tensor) -> Tensor:
        if self._target_ids is None:
            return logits
        return self._scores[: len(logits)].index_copy_(1, self._target_ids, logits)
