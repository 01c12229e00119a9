"""The formula of lamina::sample."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .row_indices import with_row_indices

# A draw is a race of exponentials (the Gumbel-max trick without its second logarithm): token i finishes at
# E_i / p_i with E_i ~ Exp(1), and the first to finish is a draw from p. E_i is a hash of (seed, position, i),
# so a row's draw knows nothing of its batch. Over the whole vocabulary the race is run twice, between chunks
# by their mass and then within the winner, so that a few hundred numbers are hashed and not all of them.
# A token's gap is (largest logit - logit) / temperature, so its odds are exp(-gap). Tokens are ordered by gap
# and, among equals, by id; the filters keep the first of them.
CHUNK = 256  # tokens that take part in the first race together
BROKEN = -1  # in place of a token where logits are not finite, so that nobody takes one of them for chosen
REACH = 1 - 2**-20  # of a share is enough: what lies exactly at a boundary may be rounded to below it


@with_row_indices
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
    """The largest logit's id where temperature is 0, else a draw from what the filters keep."""
    allowed = without_banned(logits[:, :num_valid_ids], banned)
    largest = largest_logits(allowed)
    gaps = gaps_below(largest, chunked(allowed).flatten(1), temperature)
    drawn = draw(kept_odds(gaps, top_k, top_p, min_p), row_keys(seeds, positions))
    chosen = torch.where(temperature > 0, drawn, allowed.argmax(dim=-1))
    out.copy_(chosen.masked_fill_(are_broken(allowed), BROKEN))


def are_broken(logits: Tensor) -> Tensor:
    """Of which rows no token can be chosen: any logit is NaN or infinite, or all are -inf; bool [n]."""
    return ~logits.amax(dim=-1).isfinite()


def draw(odds: Tensor, keys: Tensor) -> Tensor:
    """A token of each row [n, chunks * CHUNK] of odds, int64 [n]: first a chunk, then a token in it."""
    masses = odds.view(len(odds), odds.shape[1] // CHUNK, CHUNK).sum(dim=-1)
    chunk = first_to_finish(masses, keys, chunk_counters(masses))
    ids = token_ids(chunk)
    return chunk * CHUNK + first_to_finish(odds.gather(1, ids.long()), keys, ids)


def kept_odds(gaps: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """exp(-gap), with 0 for the tokens that top-k, top-p and min-p leave out; one sort of every row."""
    vocab = gaps.shape[1]
    nearest, order = gaps.sort(dim=-1, stable=True)
    odds = nearest.neg().exp_()
    sums = odds.double().cumsum(dim=-1)
    num_kept = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab).long().unsqueeze(-1)
    goal = top_p.double().unsqueeze(-1) * REACH * sums.gather(1, num_kept - 1)
    num_short = (sums < goal).sum(dim=-1, keepdim=True)  # the next token reaches the goal
    num_kept = torch.where(top_p.unsqueeze(-1) < 1, torch.minimum(num_kept, num_short + 1), num_kept)
    is_kept = torch.arange(vocab, device=gaps.device) < num_kept
    is_kept &= nearest <= gap_limits(min_p).unsqueeze(-1)
    return torch.zeros_like(odds).scatter_(1, order, odds.masked_fill_(~is_kept, 0.0))


def gap_limits(min_p: Tensor) -> Tensor:
    """The largest gap that min-p keeps."""
    return (min_p.double() * REACH).log_().neg_().float().clamp_(min=0.0)


def without_banned(logits: Tensor, banned: Tensor) -> Tensor:
    """The logits, or a copy with -inf for banned ids [n, any number]; what is no id bans nothing.

    NaN and infinity stay: a ban is not to hide that a row is broken.
    """
    if banned.shape[1] == 0:
        return logits
    vocab = logits.shape[1]
    is_id = (banned >= 0) & (banned < vocab)
    spare = torch.where(is_id, banned, vocab).long()
    wide = pad(logits, (0, 1))
    own = wide.gather(1, spare)
    return wide.scatter_(1, spare, own.masked_fill_(own < float("inf"), float("-inf")))[:, :-1]


def largest_logits(logits: Tensor) -> Tensor:
    """The largest logit of each row, float32 [n], finite where all are -inf."""
    return logits.amax(dim=-1).float().clamp_(min=torch.finfo(torch.float32).min)


def gaps_below(largest: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
    """(largest - logits) / temperature, float32 [n, length]: never negative, so no temperature overflows."""
    sharpness = temperature.reciprocal().clamp_(max=torch.finfo(torch.float32).max)
    return (largest.unsqueeze(-1) - logits.float()).mul_(sharpness.unsqueeze(-1))


def chunked(values: Tensor) -> Tensor:
    """[n, length] as [n, chunks, CHUNK], the last chunk filled up with -inf."""
    missing = -values.shape[1] % CHUNK
    padded = pad(values, (0, missing), value=float("-inf")) if missing else values
    return padded.view(padded.shape[0], padded.shape[1] // CHUNK, CHUNK)


def num_chunks_of(num_ids: int) -> int:
    """Chunks of so many tokens, the last perhaps with fewer."""
    return -(-num_ids // CHUNK)


def chunk_counters(masses: Tensor) -> Tensor:
    """Counters of the noise of chunks: negative, since tokens have their ids."""
    return -1 - torch.arange(masses.shape[1], dtype=torch.int32, device=masses.device)


def token_ids(chunk: Tensor) -> Tensor:
    """The ids in a chunk of each row, int32 [n, CHUNK], which are the counters of their noise as well."""
    within = torch.arange(CHUNK, dtype=torch.int32, device=chunk.device)
    return (chunk * CHUNK).unsqueeze(-1).to(torch.int32) + within


def first_to_finish(odds: Tensor, keys: Tensor, counters: Tensor) -> Tensor:
    """The winner of each row's race, int64 [n]."""
    return (odds / exponential_noise(keys, counters)).argmax(dim=-1)


def exponential_noise(keys: Tensor, counters: Tensor) -> Tensor:
    """Exp(1) numbers, float32: one for each key (row) of row_keys and each int32 counter of that row.

    Integers up to one logarithm in float64, so all devices agree but for a few of 2**31 numbers, by one last
    place. Values lie between 2**-32 and 22.2.
    """
    bits = (counters * -1640531527) ^ keys[:, :1]
    bits = _stir(bits, 16, -2048144789) + keys[:, 1:]
    bits = _stir(_stir(bits, 13, -1028477387), 16, 2146121005)
    bits = (bits ^ bits >> 15) & 0x7FFFFFFF
    return bits.double().add_(0.5).mul_(2**-31).log_().neg_().float()


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
