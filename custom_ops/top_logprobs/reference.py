"""The formula of lamina::top_logprobs."""

import torch
from torch import Tensor

IMPOSSIBLE = -9999.0  # in place of what is not finite, so that every report can be written as JSON
BROKEN_RANK = 0  # where any logit is NaN or infinite, or all are -inf
ROWS_AT_ONCE = 64  # of a large vocabulary: bounds the memory beside the logits


def top_logprobs(
    logits: Tensor, token_ids: Tensor, num_valid_ids: int, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax of the valid ids' logits in float32, at each row's token and at the num_top largest."""
    logits = logits[:, :num_valid_ids]
    blocks = [slice(start, start + ROWS_AT_ONCE) for start in range(0, max(len(logits), 1), ROWS_AT_ONCE)]
    tables = [_of_some(logits[block], token_ids[block], num_top) for block in blocks]
    ids, logprobs, ranks = zip(*tables, strict=True)
    return torch.cat(ids), torch.cat(logprobs), torch.cat(ranks)


def _of_some(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    values, own, vocab = logits.float(), token_ids.long().unsqueeze(-1), logits.shape[1]
    keys = ordered_keys(values)
    ids = torch.cat((own, keys.topk(num_top).indices), dim=-1)
    is_padding, ids = (ids < 0) | (ids >= vocab), ids.clamp(min=0, max=vocab - 1)
    ranks = (keys > keys.gather(1, ids[:, :1])).sum(dim=-1, dtype=torch.int32) + 1
    ranks = ranks.masked_fill(is_padding[:, 0], vocab + 1)
    all_logprobs = values.log_softmax(dim=-1)
    ranks.masked_fill_(all_logprobs[:, 0].isnan(), BROKEN_RANK)  # then each of them is
    logprobs = all_logprobs.gather(1, ids).masked_fill_(is_padding, IMPOSSIBLE)
    logprobs = logprobs.nan_to_num_(nan=IMPOSSIBLE, posinf=IMPOSSIBLE, neginf=IMPOSSIBLE)
    return torch.cat((token_ids.unsqueeze(-1), ids[:, 1:].to(torch.int32)), dim=-1), logprobs, ranks


def ordered_keys(values: Tensor) -> Tensor:
    """Distinct int64 keys of float32 rows: larger for larger values, then for lower ids; NaN is largest."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 is 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(values.shape[1], device=values.device)
    return (ordered.long() << 32) - ids
