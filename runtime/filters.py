"""What top-k, top-p and min-p leave of temperature-scaled logits, by the same rule on every device."""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A token's gap is (largest logit - logit) / temperature, so its odds are exp(-gap). Tokens are ordered by gap
# and, among equals, by id; the filters keep the first of them. On CPU a few candidates of each row are ranked
# by numpy, whose partition and sort are vectorised; elsewhere whole rows are sorted, and nothing waits.

CHUNK = 256  # tokens whose odds are summed together
CANDIDATES = 4096  # likeliest tokens looked at first for the end of a nucleus


class Filtered(NamedTuple):
    """What filters leave of each row."""

    masses: Tensor  # [n, chunks] float32, the summed odds of the kept tokens of each chunk
    gap: Tensor  # [n] float32, of the last token kept
    token: Tensor  # [n] int32, its id

    def apply(self, odds: Tensor, gaps: Tensor, ids: Tensor) -> Tensor:
        """The odds, in place, with 0 for the tokens after the last."""
        below = torch.nextafter(self.gap, torch.full_like(self.gap, -1.0))
        is_later = ids > self.token.unsqueeze(-1)
        limit = torch.where(is_later, below.unsqueeze(-1), self.gap.unsqueeze(-1))
        return odds.masked_fill_(gaps > limit, 0.0)


def keep(gaps: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Filtered:
    """What the filters leave of gaps [n, chunks * CHUNK]."""
    if gaps.device.type != "cpu":
        return keep_by_sorting(gaps, top_k, top_p, min_p)
    is_filtered = ((top_k > 0) & (top_k < gaps.shape[1])) | (top_p < 1) | (min_p > 0)
    is_sound = gaps.amin(dim=-1) == 0  # not so where a logit is NaN or infinite, or every one is -inf
    index = (is_filtered & is_sound).nonzero().flatten()
    if len(index) == len(gaps):
        return keep_by_ranking(gaps, top_k, top_p, min_p)
    everything = keep_all(gaps)
    if len(index) == 0:
        return everything
    some = keep_by_ranking(gaps[index], top_k[index], top_p[index], min_p[index])
    return Filtered(*(a.index_copy(0, index, b) for a, b in zip(everything, some, strict=True)))


def keep_all(gaps: Tensor) -> Filtered:
    """Every token of gaps [n, chunks * CHUNK]."""
    num_rows, vocab = gaps.shape
    return Filtered(
        gaps.neg().exp_().view(num_rows, -1, CHUNK).sum(dim=-1),
        gaps.new_full((num_rows,), float("inf")),
        torch.full((num_rows,), vocab, dtype=torch.int32, device=gaps.device),
    )


def keep_by_sorting(gaps: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Filtered:
    """The filters on gaps [n, chunks * CHUNK], by one sort of every row."""
    num_rows, vocab = gaps.shape
    nearest, order = gaps.sort(dim=-1, stable=True)
    sums = nearest.double().neg_().exp_().cumsum(dim=-1)
    last = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab).long().unsqueeze(-1) - 1
    goal = top_p.unsqueeze(-1) * sums.gather(1, last)
    end_of_nucleus = (sums < goal).sum(dim=-1, keepdim=True)
    last = torch.where(top_p.unsqueeze(-1) < 1, torch.minimum(last, end_of_nucleus), last)
    gap, token = nearest.gather(1, last).squeeze(1), order.gather(1, last).squeeze(1).to(torch.int32)
    limit = -min_p.log()
    token = torch.where(limit < gap, vocab, token)
    kept = Filtered(gaps, torch.minimum(gap, limit), token)
    ids = torch.arange(vocab, dtype=torch.int32, device=gaps.device)
    odds = kept.apply(gaps.neg().exp_(), gaps, ids)
    return kept._replace(masses=odds.view(num_rows, -1, CHUNK).sum(dim=-1))


def keep_by_ranking(gaps: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Filtered:
    """The same as keep_by_sorting, on CPU, row by row."""
    rows = zip(gaps.numpy(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    masses, gap, token = zip(*(_keep_in_row(*row) for row in rows), strict=True)
    return Filtered(
        torch.from_numpy(np.stack(masses)),
        torch.tensor(gap, dtype=torch.float32),
        torch.tensor(token, dtype=torch.int32),
    )


Row = NDArray[np.float32]


def _keep_in_row(gaps: Row, top_k: int, top_p: float, min_p: float) -> tuple[Row, float, int]:
    vocab = len(gaps)
    gap, num_equals = np.float32(np.inf), vocab
    if 0 < top_k < vocab or top_p < 1:
        gap, num_equals = _last_ranked(gaps, top_k if 0 < top_k < vocab else vocab, top_p)
    limit = np.float32(-math.log(min_p) if min_p > 0 else np.inf)
    if limit < gap:
        gap, num_equals = limit, vocab
    ids = np.flatnonzero(gaps <= gap)
    equals = ids[gaps[ids] == gap]
    token = vocab
    if num_equals < len(equals):
        token = int(equals[num_equals - 1])
        ids = ids[(ids <= token) | (gaps[ids] < gap)]
    masses = np.bincount(ids // CHUNK, weights=np.exp(-gaps[ids]), minlength=vocab // CHUNK)
    return masses.astype(np.float32), float(gap), token


def _last_ranked(gaps: Row, top_k: int, top_p: float) -> tuple[np.float32, int]:
    """Gap of the last token that top-k and top-p keep, and how many with this gap they keep."""
    nearest, num_kept = _rank(gaps, top_k, top_p)
    gap = nearest[num_kept - 1]
    return gap, num_kept - int(np.searchsorted(nearest, gap))


def _rank(gaps: Row, top_k: int, top_p: float) -> tuple[Row, int]:
    """The smallest gaps in order, as many as it takes, and how many of them are kept."""
    vocab = len(gaps)
    count = top_k if top_k < vocab else min(vocab, CANDIDATES)
    if top_p >= 1:
        return _nearest(gaps, count), count
    while True:
        nearest = _nearest(gaps, count)
        sums = np.exp(-nearest, dtype=np.float64).cumsum()
        is_all = count in (top_k, vocab)
        mass = sums[-1] if is_all else np.exp(-gaps).sum(dtype=np.float64)
        num_kept = int(np.searchsorted(sums, top_p * mass)) + 1
        if is_all or num_kept <= count:
            return nearest, min(num_kept, count)
        count = min(vocab, 8 * count)


def _nearest(gaps: Row, count: int) -> Row:
    bits = gaps.view(np.int32)  # floats that are not negative sort like their bits, and faster
    found = np.partition(bits, count - 1)[:count] if count < len(bits) else bits.copy()
    found.sort()
    return found.view(np.float32)
