"""Logits to token ids: argmax, or a draw by counter-based noise after temperature, top-k, top-p and min-p."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# A draw is a race of exponentials (the Gumbel-max trick without its second logarithm): token i finishes at
# E_i / p_i with E_i ~ Exp(1), and the first to finish is a draw from p. E_i is a hash of (seed, position, i),
# so a row's draw knows nothing of its batch. Over the whole vocabulary the race is run twice, between chunks
# by their mass and then within the winner, so that a few hundred numbers are hashed and not all of them.

CHUNK = 256  # tokens raced against each other in one chunk of the vocabulary
FINE_CHUNK = 64  # tokens in a chunk when the best few of a row are looked for
FIRST_CANDIDATES = 64  # most nuclei are smaller; a row whose nucleus is larger is looked at again
MORE_CANDIDATES = 16  # times as many
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
    chunks = _chunked(values, CHUNK)
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
    keys: Tensor  # [n, 2] int32
    rows: SamplingRows

    def select(self, index: Index) -> "_Race":
        return _Race(self.logits[index], self.largest[index], self.keys[index], self.rows.select(index))

    def gaps(self, logits: Tensor) -> Tensor:
        return (self.largest - logits.float()).div_(_column(self.rows.temperature))

    def odds(self, logits: Tensor) -> Tensor:
        return self.gaps(logits).neg_().exp_()


def _draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    largest = logits.amax(dim=-1, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).min)
    race = _Race(logits, largest, row_keys(rows.seeds, rows.positions), rows)
    if not rows.any_filter:
        return _race_all(race)
    is_cut = ((rows.top_k > 0) & (rows.top_k < logits.shape[1])) | (rows.top_p < 1)
    return _by_row(
        is_cut, lambda index: _race_cut(race.select(index)), lambda index: _race_all(race.select(index))
    )


def _race_all(race: _Race) -> Tensor:
    """A draw from the whole vocabulary, without those below min_p."""
    masses = _chunk_masses(race, with_min_p=race.rows.any_filter)
    counters = torch.arange(masses.shape[1], dtype=torch.int32, device=masses.device)
    winner = _first_to_finish(masses, race.keys, -1 - counters)  # negative: no token has this counter
    odds = race.odds(_pick_chunk(_chunked(race.logits, CHUNK), winner))
    odds = odds.masked_fill_(odds < _column(race.rows.min_p), 0.0)
    ids = _column(winner * CHUNK) + torch.arange(CHUNK, dtype=torch.int32, device=masses.device)
    return winner * CHUNK + _first_to_finish(odds, race.keys, ids)


def _chunk_masses(race: _Race, *, with_min_p: bool) -> Tensor:
    """The summed odds of each chunk of the vocabulary, float32 [n, chunks]."""
    num_rows = race.logits.shape[0]
    step = ROWS_IN_CACHE if race.logits.device.type == "cpu" else num_rows
    masses = []
    for block in (race.select(slice(start, start + step)) for start in range(0, num_rows, step)):
        odds = block.odds(_chunked(block.logits, CHUNK).flatten(1))
        if with_min_p:
            odds.masked_fill_(odds < _column(block.rows.min_p), 0.0)
        masses.append(_chunked(odds, CHUNK).sum(dim=-1))
    return torch.cat(masses)


def _mass(race: _Race) -> Tensor:
    return _chunk_masses(race, with_min_p=False).double().sum(dim=-1)


def _race_cut(race: _Race) -> Tensor:
    """A draw from the rows' likeliest tokens, as many as top_k and top_p leave."""
    vocab = race.logits.shape[1]
    top_k = torch.where(race.rows.top_k > 0, race.rows.top_k, vocab)
    if race.logits.device.type != "cpu":
        return _race_best(race, top_k, vocab)[0]
    count = max(FIRST_CANDIDATES, int(torch.where(top_k < vocab, top_k, 0).max()))
    chosen, done = _race_best(race, top_k, min(count, vocab))
    while not bool(done.all()):
        count *= MORE_CANDIDATES
        left = (~done).nonzero().flatten()
        chosen[left], done[left] = _race_best(race.select(left), top_k[left], min(count, vocab))
    return chosen


def _race_best(race: _Race, top_k: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A draw from the `count` likeliest tokens after all filters, and whether the filters kept only such."""
    gaps, ids = _best(race, count)
    rows, vocab = race.rows, race.logits.shape[1]
    rank = torch.arange(count, dtype=torch.int32, device=gaps.device)
    in_top_k = rank < _column(top_k)
    odds = torch.where(in_top_k, gaps.double().neg_().exp_(), 0.0)
    mass = _by_row(
        top_k < vocab, lambda index: odds[index].sum(dim=-1), lambda index: _mass(race.select(index))
    )
    before = odds.cumsum(dim=-1) - odds
    in_nucleus = (before < _column(rows.top_p * mass)) | (_column(rows.top_p) >= 1) | (rank == 0)
    kept = in_top_k & in_nucleus & (odds >= _column(rows.min_p))
    winner = _first_to_finish(torch.where(kept, odds, 0.0).float(), race.keys, ids.to(torch.int32))
    chosen = ids.gather(1, _column(winner).long()).squeeze(1).to(torch.int32)
    return chosen, ~kept[:, -1] | (top_k <= count) | (count == vocab)


def _best(race: _Race, count: int) -> tuple[Tensor, Tensor]:
    """Gaps and ids of the `count` likeliest tokens of each row in order, the lowest id first among equals."""
    vocab = race.logits.shape[1]
    if count == vocab:
        return race.gaps(race.logits).sort(dim=-1, stable=True)
    if count * FINE_CHUNK * 2 > vocab:
        return _smallest(race.gaps(race.logits), count)
    # The best tokens lie in the chunks that hold the best maxima, so most of the row need not be ranked.
    chunks = _chunked(race.logits, FINE_CHUNK)
    nearest = _smallest(race.gaps(chunks.amax(dim=-1)), count)[1].sort(dim=-1).values
    candidates = chunks.gather(1, nearest.unsqueeze(-1).expand(-1, -1, FINE_CHUNK)).flatten(1)
    gaps, found = _smallest(race.gaps(candidates), count)
    return gaps, nearest.gather(1, found // FINE_CHUNK) * FINE_CHUNK + found % FINE_CHUNK


def _smallest(gaps: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sorted, with indices, by selection on unique integer keys: topk leaves the order of equals open."""
    index = torch.arange(gaps.shape[1], device=gaps.device)
    keys = (gaps.view(torch.int32).long() << 32) | index  # floats that are not negative sort like their bits
    found = keys.topk(count, dim=-1, largest=False, sorted=True).values & 0xFFFFFFFF
    return gaps.gather(1, found), found


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


def _chunked(values: Tensor, width: int) -> Tensor:
    """[n, length] as [n, chunks, width], the last chunk filled up with -inf."""
    missing = -values.shape[1] % width
    padded = pad(values, (0, missing), value=float("-inf")) if missing else values
    return padded.view(padded.shape[0], padded.shape[1] // width, width)


def _pick_chunk(chunks: Tensor, winner: Tensor) -> Tensor:
    """The winning chunk of each row, [n, width]."""
    index = winner.long().view(-1, 1, 1).expand(-1, 1, chunks.shape[2])
    return chunks.gather(1, index).squeeze(1)


def _column(values: Tensor) -> Tensor:
    return values.unsqueeze(-1)
