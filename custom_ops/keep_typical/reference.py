"""The formula of lamina::keep_typical."""

import torch
from torch import Tensor

from ..sample.reference import gaps_below, largest_logits

# A token's gap is (largest logit - logit) / temperature; its surprise is that plus a number, the same for all
# tokens and for the mean. So how far a token is from typical is how far its gap is from the mean gap.


def keep_typical(logits: Tensor, temperature: Tensor, typical_p: Tensor) -> None:
    """-inf beyond the distance at which the running mass reaches typical_p; one sort of every row."""
    largest = largest_logits(logits)
    gaps = gaps_below(largest, logits, temperature)
    odds = gaps.neg().exp_().double()
    mass = odds.sum(dim=-1, keepdim=True)
    distances = (gaps - mean_gaps(gaps, odds, mass)).abs_()
    nearest, order = distances.sort(dim=-1, stable=True)
    sums = odds.gather(1, order).cumsum(dim=-1)
    num_short = (sums < typical_p.unsqueeze(-1) * mass).sum(dim=-1, keepdim=True)
    farthest = nearest.gather(1, num_short.clamp_(max=logits.shape[1] - 1))
    is_sound = gaps.amin(dim=-1) == 0  # not so where a logit is NaN or infinite, or every one is -inf
    is_filtered = (temperature > 0) & (typical_p < 1) & is_sound
    logits.masked_fill_((distances > farthest) & is_filtered.unsqueeze(-1), float("-inf"))


def mean_gaps(gaps: Tensor, odds: Tensor, mass: Tensor) -> Tensor:
    """The mean gap of each row's distribution, float32 [n, 1]; tokens without odds have no part in it."""
    parts = torch.where(odds > 0, odds * gaps, 0.0)
    return (parts.sum(dim=-1, keepdim=True) / mass).float()
