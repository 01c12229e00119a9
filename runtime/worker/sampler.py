"""Logits to token ids: what lamina::sample is given of each row."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import custom_ops
from ..protocol.scheduler_output import SchedulerOutput
from .input_batch import BatchView

# A step of so many tokens has its last piece called for those alone that are read, where they are so few. A
# shorter one on a GPU would wait for the host, which launches that piece kernel by kernel.
LEAST_TOKENS, FEWER = {"cpu": 32, "cuda": 384}, 2
Logits = Callable[[Tensor], Tensor]  # hidden [n, H] -> [n, vocab]


class SamplingRows(NamedTuple):
    """What to sample with: one entry a row of the logits.

    Everything but num_valid_ids is a tensor on the device. What a row uses is read from its entries there,
    so one CUDA graph serves greedy, random, filtered and banned rows in any mixture.
    """

    temperature: Tensor  # [n] float32, 0: greedy
    top_k: Tensor  # [n] int32, below 1: off
    top_p: Tensor  # [n] float32, 1: off
    min_p: Tensor  # [n] float32, 0: off
    seeds: Tensor  # [n] int64
    positions: Tensor  # [n, or as many as row_indices are in] int64, where the sampled token will stand
    banned: Tensor | None = None  # [n, any number] int32: token ids never to be chosen, -1: none
    num_valid_ids: int | None = None  # ids from here on are padding of the vocabulary
    row_indices: Tensor | None = None  # [n] int64: rows of positions, banned and out; None: in order


def choose(logits: Logits, num_valid_ids: int, batch: BatchView, hidden: Tensor) -> Tensor:
    """The logits [samples, vocab] of hidden states [T, H]; the samples are left where the batch has them."""
    found = logits(sampled_rows(hidden, batch))
    sample(found, rows_of(batch, num_valid_ids), batch.sampled)
    return found


def rows_of(batch: BatchView, num_valid_ids: int) -> SamplingRows:
    """What a step's samples are sampled with."""
    return SamplingRows(
        temperature=batch.temperature,
        top_k=batch.top_k,
        top_p=batch.top_p,
        min_p=batch.min_p,
        seeds=batch.seeds,
        positions=batch.sample_positions,
        banned=batch.banned,
        num_valid_ids=num_valid_ids,
    )


def sampled_rows(hidden: Tensor, batch: BatchView) -> Tensor:
    """Of hidden states [T, H] those that are sampled from: all, in their order, where there are as many."""
    if len(batch.logits_rows) == len(hidden):
        return hidden
    return hidden.index_select(0, batch.logits_rows)


def rows_read(plan: SchedulerOutput, batch: BatchView) -> Tensor | None:
    """Tokens [R] int32 of a step without drafts whose hidden states alone are read, where they are few.

    None where all may be: for log-probabilities, or to be pooled otherwise than by the last token. Where none
    is read, any one.
    """
    least = LEAST_TOKENS["cuda" if batch.token_ids.is_cuda else "cpu"]
    is_pooled = plan.pooling is not None and any(each.pooling != "last" for each in plan.pooling.params)
    if batch.logprobs is not None or is_pooled or len(batch.token_ids) < least:
        return None
    rows = batch.logits_rows
    if not len(rows):
        return torch.zeros(1, dtype=torch.int32, device=rows.device)
    return rows if len(rows) * FEWER <= len(batch.token_ids) else None


def sample(
    logits: Tensor, rows: SamplingRows, out: Tensor | None = None, chunks: Tensor | None = None
) -> Tensor:
    """The chosen token id of every row, int32 [n] (out, where given), from logits [n, vocab] of any float.

    Greedy rows take the largest logit, the lowest id among equals. Random rows are filtered in the order
    temperature, top-k, top-p (the fewest tokens with at least that mass), min-p (relative to the likeliest).
    A row whose logits are not finite has -1.
    Chunks are what lamina::adjust_logits left of these logits, where it did.
    """
    if out is None:
        out = torch.empty_like(rows.top_k)
    custom_ops.sample(
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seeds,
        rows.positions,
        rows.top_k.new_empty(len(logits), 0) if rows.banned is None else rows.banned,
        logits.shape[1] if rows.num_valid_ids is None else rows.num_valid_ids,
        out,
        rows.row_indices,
        chunks,
    )
    return out
