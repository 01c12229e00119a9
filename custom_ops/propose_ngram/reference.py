"""The formula of lamina::propose_ngram."""

import torch
from torch import Tensor


def propose_ngram(
    tokens: Tensor,
    block_tables: Tensor,
    num_computed: Tensor,
    newest: Tensor,
    min_ngram: int,
    max_ngram: int,
    out: Tensor,
) -> None:
    """Every place of every row is compared with the row's end, token by token backwards."""
    rows, capacity = len(out), block_tables.shape[1] * tokens.shape[1]
    if not out.numel():
        return
    end = num_computed.long().unsqueeze(1)  # where the newest token stands
    known = torch.cat((tokens[block_tables.long()].view(rows, capacity), newest.unsqueeze(1)), dim=1)
    known.scatter_(1, end, newest.unsqueeze(1))
    places = torch.arange(capacity + 1, device=out.device).expand(rows, -1)
    matches, length = places < end, torch.zeros_like(places)
    for back in range(max_ngram):
        wanted = known.gather(1, (end - back).clamp(min=0))
        found = known.gather(1, (places - back).clamp(min=0))
        matches = matches & (found == wanted) & (places >= back)
        length += matches
    best = (length * (capacity + 1) + places).argmax(1, keepdim=True)
    period = end - best
    after = best + 1 + torch.arange(out.shape[1], device=out.device) % period.clamp(min=1)
    is_found = (length.gather(1, best) >= min_ngram) & (period > 0)
    out.copy_(torch.where(is_found, known.gather(1, after.clamp(max=capacity)), -1))
