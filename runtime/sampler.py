"""Logits to token ids: argmax, or a draw by counter-based noise after temperature, top-k, top-p and min-p."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

# A draw is a race of exponentials (the Gumbel-max trick without its second logarithm): token i finishes at
# E_i / p_i with E_i ~ Exp(1), and the first to finish is a draw from p. E_i is a hash of (seed, position, i),
# so a row's draw knows nothing of its batch. Over the whole vocabulary the race is run twice, between chunks
# by their mass and then within the winner, so that a few hundred numbers are hashed and not all of them.

CHUNK = 256  # tokens raced against each other in one chunk of the vocabulary
CANDIDATES = 4096  # likeliest tokens looked at first for the end of a nucleus
ROWS_IN_CACHE = 4  # on CPU, rows of the vocabulary worked on at a time

Index = Tensor | slice


class SamplingRows(NamedTuple):
    """What to sample with: one entry a row of the logits, and what the caller knows of all of them."""

    temperature: Tensor  # [n] float32, 0: greedy
    top_k: Tensor  # [n] int32, below 1: off
    top_p: Tensor  # [n] float32, 1: off
    min_p: Tensor  # [n] float32, 0: off
    seeds: Tensor  # [n] int64
    positions: Tensor  # [n] int64, where in its sequence the sampled token will stand
    any_random: bool = True  # False promises that every temperature is 0
    any_filter: bool = True  # False promises that no top_k, top_p or min_p is on
    banned: Sequence[tuple[int, Sequence[int]]] = ()  # (row, token ids never to be chosen there)
    num_valid_ids: int | None = None  # ids from here on are padding of the vocabulary

    def select(self, index: Index) -> "SamplingRows":
        """The same for some of the rows."""
        return self._replace(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seeds=self.seeds[index],
            positions=self.positions[index],
        )


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The chosen token id of every row, int32 [n], from logits [n, vocab] of any float type.

    Greedy rows take the largest logit, the lowest id among equals. Random rows are filtered in the order
    temperature, top-k, top-p (the fewest tokens with at least that mass), min-p (relative to the likeliest).
    """
    logits = _without_banned(logits[:, : rows.num_valid_ids], rows.banned)
    if not rows.any_random:
        return argmax(logits)
    return _by_row(
        rows.temperature > 0,
        lambda index: _draw(logits[index], rows.select(index)),
        lambda index: argmax(logits[index]),
    )


def argmax(values: Tensor) -> Tensor:
    """Index of the largest entry of each row, the lowest among equals, int32 [n]."""
    if values.device.type != "cpu" or values.shape[1] <= CHUNK:
        return values.argmax(dim=-1).to(torch.int32)
    # On CPU amax is vectorised and argmax is not: look for the index only in the chunk with the maximum.
    chunks = _chunked(values)
    winner = chunks.amax(dim=-1).argmax(dim=-1)
    within = _pick_chunk(chunks, winner).argmax(dim=-1)
    return (winner * CHUNK + within).to(torch.int32)


def exponential_noise(keys: Tensor, counters: Tensor) -> Tensor:
    """Exp(1) numbers, float32: one for each key (row) of row_keys and each int32 counter of that row.

    Integer operations up to the last step, hence the same on every device. Values lie between 2**-33 and 17.
    """
    bits = (counters * -1640531527) ^ keys[:, :1]
    bits *= keys[:, 1:] | 1
    bits ^= bits >> 15
    bits *= 739982445
    bits ^= bits >> 16  # the shift keeps the sign, so this clears it: 31 bits are left
    uniform = bits.float().mul_(2**-31 * (1 - 2**-24)).add_(2**-33)
    return uniform.neg_().log1p_().neg_()


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Two int32 words for every (seed, position), each bit of which depends on each bit of both."""
    mixed = _mix(_mix(seeds - 7046029254386353131) + positions * -7046029254386353131)
    return mixed.unsqueeze(-1).view(torch.int32)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ (words >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    words = (words ^ (words >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return words ^ (words >> 31 & 0x1FFFFFFFF)


class _Race(NamedTuple):
    """The rows that draw: p is proportional to exp(-gap), gap = (largest logit - logit) / temperature.

    No gap is negative, so no temperature overflows and the likeliest token has odds of exactly 1.
    """

    logits: Tensor  # [n, vocab]
    largest: Tensor  # [n, 1] float32
    rows: SamplingRows

    def select(self, index: Index) -> "_Race":
        return _Race(self.logits[index], self.largest[index], self.rows.select(index))

    def gaps(self, logits: Tensor) -> Tensor:
        return (self.largest - logits.float()).div_(_column(self.rows.temperature))


class _Cut(NamedTuple):
    """The last token that the filters keep, in the order of gaps and, among equals, of ids."""

    gap: Tensor  # [n] float32
    token: Tensor  # [n] int32

    def apply(self, odds: Tensor, gaps: Tensor, ids: Tensor) -> Tensor:
        """The odds, in place, with 0 for the tokens beyond."""
        below = torch.nextafter(self.gap, self.gap.new_tensor(-1.0))
        limit = torch.where(ids > _column(self.token), _column(below), _column(self.gap))
        return odds.masked_fill_(gaps > limit, 0.0)


def _draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    """A draw for each row, first of a chunk of the vocabulary and then of a token in it."""
    largest = logits.amax(dim=-1, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).min)
    race = _Race(logits, largest, rows)
    masses, cut = _survey(race)
    keys = row_keys(rows.seeds, rows.positions)
    chunks = torch.arange(masses.shape[1], dtype=torch.int32, device=logits.device)
    chunk = _first_to_finish(masses, keys, -1 - chunks)  # negative: no token has this counter
    ids = _column(chunk * CHUNK) + torch.arange(CHUNK, dtype=torch.int32, device=logits.device)
    gaps = race.gaps(_pick_chunk(_chunked(logits), chunk))
    return chunk * CHUNK + _first_to_finish(cut.apply(gaps.neg().exp_(), gaps, ids), keys, ids)


def _survey(race: _Race) -> tuple[Tensor, _Cut]:
    """The summed odds of each chunk after the filters, float32 [n, chunks], and where the filters end."""
    num_rows = race.logits.shape[0]
    step = ROWS_IN_CACHE if race.logits.device.type == "cpu" else num_rows
    blocks = [_survey_block(race.select(slice(i, i + step))) for i in range(0, num_rows, step)]
    masses, gaps, tokens = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return masses, _Cut(gaps, tokens)


def _survey_block(race: _Race) -> tuple[Tensor, Tensor, Tensor]:
    gaps = race.gaps(_chunked(race.logits).flatten(1))
    odds = gaps.neg().exp_()
    cut = _find_cut(gaps, odds, race.rows)
    if race.rows.any_filter:
        cut.apply(odds, gaps, torch.arange(gaps.shape[1], dtype=torch.int32, device=gaps.device))
    return _chunked(odds).sum(dim=-1), cut.gap, cut.token


def _find_cut(gaps: Tensor, odds: Tensor, rows: SamplingRows) -> _Cut:
    """The nearest of the ends that top-k, top-p and min-p set."""
    gap = -rows.min_p.log()
    token = torch.full_like(rows.top_k, gaps.shape[1])
    is_ranked = ((rows.top_k > 0) & (rows.top_k < gaps.shape[1])) | (rows.top_p < 1)
    if rows.any_filter and (gaps.device.type != "cpu" or bool(is_ranked.any())):
        last = _find_last(gaps, _chunked(odds).sum(dim=-1).double().sum(dim=-1), rows, is_ranked)
        is_nearer = is_ranked & (last.gap <= gap)
        gap, token = torch.where(is_nearer, last.gap, gap), torch.where(is_nearer, last.token, token)
    return _Cut(gap, token)


def _find_last(gaps: Tensor, mass: Tensor, rows: SamplingRows, is_ranked: Tensor) -> _Cut:
    """The last token that top-k and top-p keep; any token for rows that are not ranked."""
    vocab = gaps.shape[1]
    top_k = torch.where(rows.top_k > 0, rows.top_k, vocab).clamp_(max=vocab).long()
    top_k = torch.where(is_ranked, top_k, 1)
    count = vocab
    if gaps.device.type == "cpu":  # most rows end early: rank only their likeliest tokens
        count = min(vocab, int(torch.where(top_k < vocab, top_k, CANDIDATES).max()))
    while True:
        nearest = _nearest(gaps, count)
        num_kept = _num_kept(nearest, mass, top_k, rows.top_p)
        if count == vocab or bool((num_kept <= count).all()):
            return _last_of(gaps, nearest, num_kept.clamp_(max=count))
        count = min(vocab, 8 * count)


def _num_kept(nearest: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """How many tokens top-k and top-p keep; more than there are in `nearest` where these do not suffice."""
    sums = nearest.double().neg_().exp_().cumsum(dim=-1)
    has_all = top_k <= nearest.shape[1]
    mass = torch.where(
        has_all, sums.gather(1, _column(top_k.clamp(max=nearest.shape[1]) - 1)).squeeze(1), mass
    )
    nucleus = (sums < _column(top_p * mass)).sum(dim=-1) + 1
    return torch.minimum(top_k, torch.where(top_p < 1, nucleus, top_k))


def _last_of(gaps: Tensor, nearest: Tensor, num_kept: Tensor) -> _Cut:
    """The last of the num_kept tokens nearest to the top; of equals the lowest ids are kept."""
    gap = nearest.gather(1, _column(num_kept - 1))
    num_equals_kept = num_kept - (nearest < gap).sum(dim=-1)
    following = nearest.gather(1, _column(num_kept.clamp(max=nearest.shape[1] - 1)))
    splits_equals = (following <= gap).squeeze(1)  # also where it is the last of `nearest`: more may follow

    def nth_equal(index: Index) -> Tensor:
        equals = (gaps[index] == gap[index]).cumsum(dim=-1, dtype=torch.int32)
        return (equals < _column(num_equals_kept[index])).sum(dim=-1, dtype=torch.int32)

    def every_equal(index: Index) -> Tensor:
        return torch.full_like(num_kept[index], gaps.shape[1], dtype=torch.int32)

    return _Cut(gap.squeeze(1), _by_row(splits_equals, nth_equal, every_equal))


def _nearest(gaps: Tensor, count: int) -> Tensor:
    """The `count` smallest gaps of each row in order."""
    if gaps.device.type != "cpu":
        return gaps.sort(dim=-1).values[:, :count]
    bits = gaps.numpy().view(
        np.int32
    )  # floats that are not negative sort like their bits, and numpy sorts faster
    found = np.partition(bits, count - 1, axis=-1)[:, :count] if count < bits.shape[1] else bits.copy()
    found.sort(axis=-1)
    return torch.from_numpy(found).view(torch.float32)


def _first_to_finish(odds: Tensor, keys: Tensor, counters: Tensor) -> Tensor:
    return argmax(odds / exponential_noise(keys, counters))


def _without_banned(logits: Tensor, banned: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
    if not banned:
        return logits
    logits = logits.clone()
    for row, ids in banned:
        logits[row, [token for token in ids if token < logits.shape[1]]] = float("-inf")
    return logits


def _by_row(
    mask: Tensor, where_true: Callable[[Index], Tensor], where_false: Callable[[Index], Tensor]
) -> Tensor:
    """One value a row: where_true(index) for the rows of the mask, where_false(index) for the others."""
    everything = slice(None)
    if mask.device.type != "cpu":  # without waiting for the device: compute both for every row
        return torch.where(mask, where_true(everything), where_false(everything))
    yes, no = mask.nonzero().flatten(), (~mask).nonzero().flatten()
    if len(yes) == 0 or len(no) == 0:
        return where_true(everything) if len(yes) else where_false(everything)
    first, second = where_true(yes), where_false(no)
    return first.new_empty(len(mask)).index_copy_(0, yes, first).index_copy_(0, no, second)


def _chunked(values: Tensor) -> Tensor:
    """[n, length] as [n, chunks, CHUNK], the last chunk filled up with -inf."""
    missing = -values.shape[1] % CHUNK
    padded = pad(values, (0, missing), value=float("-inf")) if missing else values
    return padded.view(padded.shape[0], padded.shape[1] // CHUNK, CHUNK)


def _pick_chunk(chunks: Tensor, winner: Tensor) -> Tensor:
    """The winning chunk of each row, [n, CHUNK]."""
    index = winner.long().view(-1, 1, 1).expand(-1, 1, chunks.shape[2])
    return chunks.gather(1, index).squeeze(1)


def _column(values: Tensor) -> Tensor:
    return values.unsqueeze(-1)
