"""Logits to token ids: argmax, or a draw by counter-based noise after temperature, top-k, top-p and min-p."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .filters import CHUNK, Filtered, keep, keep_all

# A draw is a race of exponentials (the Gumbel-max trick without its second logarithm): token i finishes at
# E_i / p_i with E_i ~ Exp(1), and the first to finish is a draw from p. E_i is a hash of (seed, position, i),
# so a row's draw knows nothing of its batch. Over the whole vocabulary the race is run twice, between chunks
# by their mass and then within the winner, so that a few hundred numbers are hashed and not all of them.

ROWS_IN_CACHE = 4  # on CPU, rows of the vocabulary worked on at a time

Index = Tensor | slice


class SamplingRows(NamedTuple):
    """What to sample with: one entry a row of the logits, and what the caller knows of all of them.

    Calling convention: `sample(logits, rows, out)`, where everything but num_valid_ids is a tensor of the
    arena and out int32 [n] may be one too, written in place. What a row uses is read from its entries on the
    device, so one recording serves greedy, random, filtered and banned rows in any mixture; any_random,
    any_filter and the list `banned` are for callers that do not yet give `banned_ids`, and will go.
    """

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
    banned_ids: Tensor | None = None  # [n, K] int32, any K: token ids never to be chosen there, -1: none

    def select(self, index: Index) -> "SamplingRows":
        """The same for some of the rows."""
        return self._replace(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seeds=self.seeds[index],
            positions=self.positions[index],
            banned_ids=None if self.banned_ids is None else self.banned_ids[index],
        )


def sample(logits: Tensor, rows: SamplingRows, out: Tensor | None = None) -> Tensor:
    """The chosen token id of every row, int32 [n] (out, where given), from logits [n, vocab] of any float.

    Greedy rows take the largest logit, the lowest id among equals. Random rows are filtered in the order
    temperature, top-k, top-p (the fewest tokens with at least that mass), min-p (relative to the likeliest).
    """
    chosen = _sample(logits, rows)
    return chosen if out is None else out.copy_(chosen)


def _sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    logits = _without_banned(logits[:, : rows.num_valid_ids], rows.banned)
    if rows.banned_ids is not None:
        logits = _without_banned_ids(logits, rows.banned_ids)
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
    bits = _stir(bits, 16, -2048144789) + keys[:, 1:]
    bits = _stir(_stir(bits, 13, -1028477387), 16, 2146121005)
    bits = (bits ^ bits >> 15) & 0x7FFFFFFF
    uniform = bits.float().mul_(2**-31 * (1 - 2**-24)).add_(2**-33)
    return uniform.neg_().log1p_().neg_()


def _stir(bits: Tensor, shift: int, factor: int) -> Tensor:
    """A bijection of int32 words that lets high bits reach low ones, then low bits high ones."""
    return (bits ^ (bits >> shift & (1 << 32 - shift) - 1)) * factor


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Two int32 words for every (seed, position), each bit of which depends on each bit of both."""
    mixed = _mix(_mix(seeds - 7046029254386353131) + positions * -7046029254386353131)
    return mixed.unsqueeze(-1).view(torch.int32)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ (words >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    words = (words ^ (words >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return words ^ (words >> 31 & 0x1FFFFFFFF)


def _draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    """A draw for each row, first of a chunk of the vocabulary and then of a token in it."""
    chunks = _chunked(logits)
    largest = logits.amax(dim=-1).float().clamp_(min=torch.finfo(torch.float32).min)
    kept = _filter(chunks.flatten(1), largest, rows)
    keys = row_keys(rows.seeds, rows.positions)
    counters = torch.arange(chunks.shape[1], dtype=torch.int32, device=logits.device)
    chunk = _first_to_finish(kept.masses, keys, -1 - counters)  # negative: no token has this counter
    ids = _column(chunk * CHUNK) + torch.arange(CHUNK, dtype=torch.int32, device=logits.device)
    gaps = _gaps(_pick_chunk(chunks, chunk), largest, rows.temperature)
    return chunk * CHUNK + _first_to_finish(kept.apply(gaps.neg().exp_(), gaps, ids), keys, ids)


def _gaps(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """(largest logit - logit) / temperature: never negative, so no temperature overflows."""
    return (_column(largest) - logits.float()).div_(_column(temperature))


def _filter(logits: Tensor, largest: Tensor, rows: SamplingRows) -> Filtered:
    """What the filters leave of each row."""
    num_rows = len(logits)
    step = ROWS_IN_CACHE if logits.device.type == "cpu" else num_rows
    blocks = []
    for block in (slice(start, start + step) for start in range(0, num_rows, step)):
        gaps = _gaps(logits[block], largest[block], rows.temperature[block])
        filters = (rows.top_k[block], rows.top_p[block], rows.min_p[block])
        blocks.append(keep(gaps, *filters) if rows.any_filter else keep_all(gaps))
    return Filtered(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def _first_to_finish(odds: Tensor, keys: Tensor, counters: Tensor) -> Tensor:
    return argmax(odds / exponential_noise(keys, counters))


def _without_banned(logits: Tensor, banned: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
    if not banned:
        return logits
    logits = logits.clone()
    for row, ids in banned:
        logits[row, [token for token in ids if token < logits.shape[1]]] = float("-inf")
    return logits


def _without_banned_ids(logits: Tensor, banned_ids: Tensor) -> Tensor:
    if logits.device.type == "cpu" and not (banned_ids >= 0).any():
        return logits
    index = banned_ids.long()
    outside = (index < 0) | (index >= logits.shape[1])
    widened = pad(logits, (0, 1))  # a column for what is no id
    return widened.scatter_(1, index.masked_fill(outside, logits.shape[1]), float("-inf"))[:, :-1]


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
