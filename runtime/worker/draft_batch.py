"""What a step reads beside the input batch where there is a drafter: whose drafts its rows have."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..protocol.scheduler_output import ON_HOST, SchedulerOutput
from .input_batch import BatchView
from .staging import fill, send_to

# Of each row.
FIELDS = ("sources", "computed", "capacities", "limits", "first_samples", "num_drafts", "num_samples")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRows:
    """One step's, padded as its batch is; all int32, on the device, at the same addresses for equal sizes."""

    sources: Tensor  # [seqs] the row of the step before that says how many tokens are computed, or ON_HOST
    computed: Tensor  # [seqs] tokens computed as the host knows: the least
    capacities: Tensor  # [seqs] a token from there on is written nowhere
    limits: Tensor  # [seqs] tokens that it may have, of which the last is never computed
    first_samples: Tensor  # [seqs] where the row's samples begin
    num_drafts: Tensor  # [seqs] of its tokens, fillers among them
    num_samples: Tensor  # [seqs] 0 of a row amid a prompt
    token_rows: Tensor  # [tokens] the row of each token
    sample_rows: Tensor  # [samples] and of each sample
    most_drafts: int  # of any row
    num_next: int  # drafts of each row that the step leaves for the next one
    may_move: bool = True  # whether any row may have more tokens than the host knows, or drafts


class DraftBatch:
    """Writes what plans say of drafts into tensors that never move."""

    def __init__(self, *, max_num_seqs: int, max_num_tokens: int, max_num_samples: int, device: torch.device):
        self._device = device
        size = len(FIELDS) * max_num_seqs + max_num_tokens + max_num_samples
        self._memory = torch.zeros(size, dtype=torch.int32, device=device)
        self._views: dict[tuple[int, int, int], dict[str, Tensor]] = {}

    def write(self, plan: SchedulerOutput, batch: BatchView) -> DraftRows:
        """Write a step that lies in the input batch, with its padding."""
        sizes = len(batch.seq_lens), len(batch.token_ids), len(batch.logits_rows)
        packed = np.zeros(len(FIELDS) * sizes[0] + sizes[1] + sizes[2], np.int32)
        _fill(packed, plan, sizes)
        send_to(self._memory, packed)
        drafts = (plan.num_sampled_tokens - 1).clip(0)
        num_next = 0 if plan.drafts is None else plan.drafts.num_next
        most_drafts = int(drafts.max(initial=0))
        may_move = most_drafts > 0 or bool((plan.sources != ON_HOST).any())
        return self.view(sizes, most_drafts=most_drafts, num_next=num_next, may_move=may_move)

    def view(
        self, sizes: tuple[int, int, int], *, most_drafts: int, num_next: int, may_move: bool = True
    ) -> DraftRows:
        """Where a step of so many sequences, tokens and samples lies."""
        if sizes not in self._views:
            self._views[sizes] = _views(self._memory, sizes)
        views = self._views[sizes]
        return DraftRows(most_drafts=most_drafts, num_next=num_next, may_move=may_move, **views)


def _views(memory: Tensor, sizes: tuple[int, int, int]) -> dict[str, Tensor]:
    seqs, tokens, samples = sizes
    starts = [seqs * number for number in range(len(FIELDS) + 1)]
    views = {name: memory[start : start + seqs] for name, start in zip(FIELDS, starts, strict=False)}
    views["token_rows"] = memory[starts[-1] : starts[-1] + tokens]
    views["sample_rows"] = memory[starts[-1] + tokens : starts[-1] + tokens + samples]
    return views


def _fill(packed: NDArray[np.int32], plan: SchedulerOutput, sizes: tuple[int, int, int]) -> None:
    """Padding rows have no source, no room and no drafts; padding tokens and samples are of row 0."""
    seqs, tokens, _ = sizes
    num_sampled = plan.num_sampled_tokens
    drafts, lengths = plan.drafts, plan.num_computed_tokens + plan.num_scheduled_tokens
    columns: tuple[tuple[Any, int], ...] = (
        (plan.sources, ON_HOST),
        (plan.num_computed_tokens, 0),
        (lengths if drafts is None else drafts.capacities, 0),
        (lengths + 1 if drafts is None else drafts.limits, 1),
        (np.cumsum(num_sampled) - num_sampled, 0),
        ((num_sampled - 1).clip(0), 0),
        (num_sampled, 0),
    )
    for number, (values, padding) in enumerate(columns):
        fill(packed, slice(number * seqs, (number + 1) * seqs), values, padding=padding)
    start = len(FIELDS) * seqs
    rows = np.arange(plan.num_rows)
    packed[start : start + plan.num_tokens] = np.repeat(rows, plan.num_scheduled_tokens)
    start += tokens
    packed[start : start + plan.num_samples] = np.repeat(rows, num_sampled)
