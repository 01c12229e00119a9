"""Row indices, for providers that take rows in order: positions and bans gathered, results scattered."""

from collections.abc import Callable

import torch
from torch import Tensor


def with_row_indices(choose: Callable[..., None]) -> Callable[..., None]:
    """The op's call, made of one that takes neither row_indices nor chunks."""

    def sample(
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        banned: Tensor,
        num_valid_ids: int,
        out: Tensor,
        row_indices: Tensor | None = None,
        chunks: Tensor | None = None,
    ) -> None:
        filters = logits, temperature, top_k, top_p, min_p, seeds
        if row_indices is None:
            choose(*filters, positions, banned, num_valid_ids, out)
            return
        chosen = torch.empty_like(top_k)
        own = positions.index_select(0, row_indices), banned.index_select(0, row_indices)
        choose(*filters, *own, num_valid_ids, chosen)
        out.index_copy_(0, row_indices, chosen)

    sample.__doc__ = choose.__doc__  # its signature is another, so nothing else of it
    return sample
