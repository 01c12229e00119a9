"""For providers that take rows as they come: rows that have their positions, bans and results elsewhere."""

from collections.abc import Callable

import torch
from torch import Tensor


def at_places(choose: Callable[..., None]) -> Callable[..., None]:
    """The op's call, made of one that knows neither places nor chunks."""

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
        places: Tensor | None = None,
        chunks: Tensor | None = None,
    ) -> None:
        filters = logits, temperature, top_k, top_p, min_p, seeds
        if places is None:
            choose(*filters, positions, banned, num_valid_ids, out)
            return
        chosen = torch.empty_like(top_k)
        own = positions.index_select(0, places), banned.index_select(0, places)
        choose(*filters, *own, num_valid_ids, chosen)
        out.index_copy_(0, places, chosen)

    sample.__doc__ = choose.__doc__  # its signature is another, so nothing else of it
    return sample
