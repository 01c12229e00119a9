"""The formula of lamina::adjust_logits."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..sample.reference import chunked

WORD_BITS = 32  # of the table of allowed ids


def adjust_logits(
    logits: Tensor,
    rows: Tensor,
    history: Tensor,
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    last_tokens: Tensor,
    num_prompt: Tensor,
    penalties: Tensor,
    bias_ids: Tensor,
    biases: Tensor,
    allowed: Tensor,
    bad_words: Tensor,
    banned: Tensor,
    temperature: Tensor,
    num_valid_ids: int,
    out: Tensor,
    chunks: Tensor,
) -> None:
    """Biases and exclusions, then penalties, each over whole rows."""
    lengths = positions.index_select(0, rows)
    remember(history, slots, lengths, token_ids.index_select(0, last_tokens.index_select(0, rows)))
    wanted = logits.index_select(0, rows)[:, :num_valid_ids].float()
    tokens = history.index_select(0, slots)
    spare = num_valid_ids  # a column for what is no id
    wide = pad(wanted, (0, 1)).scatter_add_(1, ids_or(bias_ids, spare), biases)
    is_excluded = torch.zeros_like(wide, dtype=torch.bool)
    for excluded in (banned.index_select(0, rows), completions(bad_words, tokens, lengths)):
        is_excluded.scatter_(1, ids_or(excluded, spare), True)
    scores, is_excluded = wide[:, :-1], is_excluded[:, :-1]
    if allowed.shape[1]:
        is_excluded = is_excluded | ~unpacked(allowed, num_valid_ids)
    # NaN and infinity stay: an exclusion is not to hide that a row is broken
    scores = scores.masked_fill(is_excluded & (scores < float("inf")), float("-inf"))
    positions = torch.arange(history.shape[1], device=history.device)
    is_said = positions < lengths.unsqueeze(-1)
    is_answer = is_said & (positions >= num_prompt.unsqueeze(-1))
    was_said = counts(tokens, is_said, num_valid_ids) > 0
    num_said = counts(tokens, is_answer, num_valid_ids)
    repetition, frequency, presence = penalties.unsqueeze(-1)
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(was_said, repeated, scores)
    lowered = scores - frequency * num_said - presence
    out.fill_(float("-inf"))
    out[:, :num_valid_ids] = torch.where(num_said > 0, lowered, scores)
    if chunks.shape[1]:
        chunks.copy_(summaries(out[:, :num_valid_ids], temperature))


def remember(history: Tensor, slots: Tensor, lengths: Tensor, newest: Tensor) -> None:
    """Write each row's newest token to its position in the history."""
    history.view(-1).index_copy_(0, slots * history.shape[1] + lengths - 1, newest)


def summaries(scores: Tensor, temperature: Tensor) -> Tensor:
    """Of each chunk of a row the largest score, and the summed odds relative to it where tokens are drawn."""
    parts = chunked(scores)
    largest = parts.amax(dim=-1)
    base = largest.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)
    sharpness = temperature.reciprocal().clamp_(max=torch.finfo(torch.float32).max).view(-1, 1, 1)
    odds = ((parts - base) * sharpness).exp().sum(dim=-1)
    return torch.stack((largest, torch.where(temperature.unsqueeze(-1) > 0, odds, 0.0)), dim=-1)


def ids_or(ids: Tensor, spare: int) -> Tensor:
    """Ids as an index, with a spare one for what is none."""
    return torch.where((ids >= 0) & (ids < spare), ids, spare).long()


def counts(tokens: Tensor, is_counted: Tensor, num_ids: int) -> Tensor:
    """How often each id is among the counted tokens [m, any number], int32 [m, num_ids]."""
    index = ids_or(torch.where(is_counted, tokens, -1), num_ids)
    found = torch.zeros(len(tokens), num_ids + 1, dtype=torch.int32, device=tokens.device)
    return found.scatter_add_(1, index, torch.ones_like(tokens))[:, :-1]


def completions(bad_words: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """The last id of each word [m, words, longest] whose others came last, else -1, [m, words]."""
    longest = bad_words.shape[2]
    if not bad_words.numel():
        return bad_words.new_full((len(bad_words), 0), -1)
    earlier = bad_words[:, :, :-1]
    positions = lengths.unsqueeze(-1) - longest + 1 + torch.arange(longest - 1, device=tokens.device)
    newest = torch.where(positions >= 0, tokens.gather(1, positions.clamp(min=0)), -2)  # -2 matches nothing
    is_met = ((earlier == newest.unsqueeze(1)) | (earlier < 0)).all(dim=-1)
    return torch.where(is_met, bad_words[:, :, -1], -1)


def unpacked(allowed: Tensor, num_ids: int) -> Tensor:
    """The bits of words [m, any number] as booleans [m, num_ids]."""
    bits = allowed.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int32, device=allowed.device) & 1
    return bits.flatten(1)[:, :num_ids].bool()
