"""Steps of one token a row that follow a step of the model: where their keys and values go, on the device."""

import dataclasses

import torch
from torch import Tensor

from ..drafter import DraftInput
from ..input_batch import NO_SLOT, BatchView


def one_a_row(step: DraftInput, token_ids: Tensor, positions: Tensor, block_size: int) -> BatchView:
    """A step of a token [rows] int32 a row at these positions [rows] int32.

    A row amid a prompt has any length, and what comes of it means nothing: attention wants as many tokens as
    it has queries. What lies beyond a row's blocks is written nowhere.
    """
    num_rows = len(positions)
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=positions.device)
    lengths = torch.minimum(positions + 1, step.capacities)
    return _moved(
        step,
        token_ids,
        positions,
        torch.where(step.is_sampling, lengths, 1).clamp(min=1),
        rows[:-1],
        step.capacities,
        step.is_sampling,
        block_size,
        query_start_loc=rows,
        max_query_len=1,
    )


def one_further(step: DraftInput, token_ids: Tensor, block_size: int) -> BatchView:
    """The same tokens of a step one position on, where all of them are sampled behind.

    token_ids [tokens] int32 are those that stand there. Rows have any numbers of tokens, as some have drafts.
    """
    batch, ends = step.batch, step.batch.query_start_loc[1:]
    places = torch.arange(len(batch.token_ids), dtype=torch.int32, device=token_ids.device)
    rows = torch.bucketize(places, ends, right=True).clamp(max=len(ends) - 1)  # of padding the last
    each = ends - batch.query_start_loc[:-1]
    lengths = torch.minimum(batch.seq_lens + 1, step.capacities)
    return _moved(
        step,
        token_ids,
        batch.positions + 1,
        torch.maximum(torch.where(step.is_sampling, lengths, each), each),
        rows,
        step.capacities.index_select(0, rows),
        step.is_sampling.index_select(0, rows),
        block_size,
    )


def _moved(
    step: DraftInput,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    rows: Tensor,  # of each token
    capacities: Tensor,  # of each token's row
    is_written: Tensor,  # whether its row has anything to be written
    block_size: int,
    **changes: object,
) -> BatchView:
    """The step's batch with other tokens, whose slots are looked up in the tables of the first group."""
    inside = torch.minimum(positions, capacities - 1).clamp(min=0)
    columns = inside // block_size
    blocks = step.batch.block_tables[0][rows, columns]
    slots = (blocks - columns) * block_size + inside
    is_inside = is_written & (positions < capacities) & (positions >= 0)
    return dataclasses.replace(
        step.batch,
        num_tokens=len(token_ids),
        token_ids=token_ids,
        positions=inside,
        slot_mappings=(torch.where(is_inside, slots, NO_SLOT),),
        seq_lens=seq_lens,
        logprobs=None,
        **changes,  # type: ignore[arg-type]
    )
