"""lamina::sample on CPU: the same tokens as the formula's, with vectorised maxima and no sort of a row."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._shared.call_capture import uncapturable
from .._shared.registry import Provider
from .reference import (
    BROKEN,
    CHUNK,
    REACH,
    are_broken,
    chunk_counters,
    chunked,
    exponential_noise,
    gap_limits,
    gaps_below,
    largest_logits,
    row_keys,
    token_ids,
    without_banned,
)
from .row_indices import with_row_indices

CANDIDATES = 4096  # likeliest tokens looked at first for the end of a nucleus
ROWS_IN_CACHE = 4  # rows of the vocabulary worked on at a time

Index = Tensor | slice
Row = NDArray[np.float32]


class Filters(NamedTuple):
    """The columns that say what to keep of each row, and how to draw from it."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    def select(self, index: Index) -> "Filters":
        """The same for some of the rows."""
        return Filters(*(column[index] for column in self))


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
) -> None:
    """The token of each row, in their order."""
    logits = logits[:, :num_valid_ids]
    if banned.numel() and banned.numpy().max() >= 0:
        logits = without_banned(logits, banned)
    choose(logits, Filters(temperature, top_k, top_p, min_p, seeds, positions), out)
    out.masked_fill_(are_broken(logits), BROKEN)


def choose(logits: Tensor, filters: Filters, out: Tensor) -> None:
    """The token of each row that is sound, any of one that is not."""
    is_random = filters.temperature.numpy() > 0
    num_random = np.count_nonzero(is_random)
    if num_random == 0:
        out.copy_(argmax(logits))
        return
    if num_random == len(out):
        out.copy_(draw(logits, filters))
        return
    random, greedy = (torch.from_numpy(np.flatnonzero(rows)) for rows in (is_random, ~is_random))
    out[greedy] = argmax(logits[greedy])
    out[random] = draw(logits[random], filters.select(random))


def argmax(values: Tensor) -> Tensor:
    """Index of the largest entry of each row, the lowest among equals, int32 [n]."""
    if values.shape[1] <= CHUNK:
        return values.argmax(dim=-1).int()
    # amax is vectorised and argmax is not: look for the index only in the chunk with the maximum.
    chunks = chunked(values)
    winner = chunks.amax(dim=-1).argmax(dim=-1)
    within = _pick_chunk(chunks, winner).argmax(dim=-1)
    return (winner * CHUNK + within).to(torch.int32)


def draw(logits: Tensor, filters: Filters) -> Tensor:
    """A draw for each row, first of a chunk of the vocabulary and then of a token in it, int32 [n]."""
    chunks = chunked(logits)
    largest = largest_logits(logits)
    kept = _keep_in_blocks(chunks.flatten(1), largest, filters)
    keys = row_keys(filters.seeds, filters.positions)
    chunk = argmax(kept.masses / exponential_noise(keys, chunk_counters(kept.masses)))
    ids = token_ids(chunk)
    gaps = gaps_below(largest, _pick_chunk(chunks, chunk), filters.temperature)
    odds = kept.apply(gaps.neg().exp_(), gaps, ids)
    return chunk * CHUNK + argmax(odds / exponential_noise(keys, ids))


def _pick_chunk(chunks: Tensor, winner: Tensor) -> Tensor:
    """The winning chunk of each row, [n, CHUNK]."""
    index = winner.long().view(-1, 1, 1).expand(-1, 1, chunks.shape[2])
    return chunks.gather(1, index).squeeze(1)


def _keep_in_blocks(logits: Tensor, largest: Tensor, filters: Filters) -> Filtered:
    blocks = []
    for start in range(0, len(logits), ROWS_IN_CACHE):
        block = slice(start, start + ROWS_IN_CACHE)
        gaps = gaps_below(largest[block], logits[block], filters.temperature[block])
        blocks.append(keep(gaps, filters.top_k[block], filters.top_p[block], filters.min_p[block]))
    return Filtered(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def keep(gaps: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Filtered:
    """What the filters leave of gaps [n, chunks * CHUNK]."""
    is_filtered = ((top_k > 0) & (top_k < gaps.shape[1])) | (top_p < 1) | (min_p > 0)
    if not is_filtered.any():
        return keep_all(gaps)
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
        torch.full((num_rows,), vocab, dtype=torch.int32),
    )


def keep_by_ranking(gaps: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Filtered:
    """The same for sound rows, one by one: numpy's partition and sort are vectorised."""
    limits = gap_limits(min_p).numpy()
    rows = zip(gaps.numpy(), top_k.tolist(), top_p.tolist(), limits, strict=True)
    masses, gap, token = zip(*(_keep_in_row(*row) for row in rows), strict=True)
    return Filtered(
        torch.from_numpy(np.stack(masses)),
        torch.tensor(gap, dtype=torch.float32),
        torch.tensor(token, dtype=torch.int32),
    )


def _keep_in_row(gaps: Row, top_k: int, top_p: float, limit: np.float32) -> tuple[Row, float, int]:
    vocab = len(gaps)
    gap, num_equals = np.float32(math.inf), vocab
    if 0 < top_k < vocab or top_p < 1:
        gap, num_equals = _last_ranked(gaps, top_k if 0 < top_k < vocab else vocab, top_p)
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
        num_kept = int(np.searchsorted(sums, top_p * REACH * mass)) + 1
        if is_all or num_kept <= count:
            return nearest, min(num_kept, count)
        count = min(vocab, 8 * count)


def _nearest(gaps: Row, count: int) -> Row:
    bits = gaps.view(np.int32)  # floats that are not negative sort like their bits, and faster
    found = np.partition(bits, count - 1)[:count] if count < len(bits) else bits.copy()
    found.sort()
    return found.view(np.float32)


def load() -> Callable[..., None]:
    """The op's function."""
    return uncapturable(with_row_indices(sample), "NumPy computes what sample does")


PROVIDER = Provider(name="numpy", load=load, devices=frozenset({"cpu"}))
