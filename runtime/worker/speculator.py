"""Draft tokens of a step on the device: put in their place, judged by what was sampled, then proposed."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..protocol.scheduler_output import SchedulerOutput
from .draft_batch import DraftBatch, DraftRows
from .drafter import NO_DRAFT, Drafter, DraftInput
from .input_batch import NO_SLOT, BatchView, InputBatch


class Verdict(NamedTuple):
    """What became of each row's drafts, int32 [rows], on the device or the host."""

    accepted: Tensor  # that hold
    drafted: Tensor  # that were no fillers
    proposed: Tensor  # that were left for the next step


class Speculator:
    """Keeps how many tokens of each row are computed, since the host learns only later which drafts held.

    A step begins where the step before left its rows: positions, slots and lengths, written for the least
    that can be, are moved on by the drafts that held. Tokens that were computed in vain lie beyond, where
    the next ones overwrite them. Nothing here waits for the device.

    All that a row's tokens can see is written, in this step at the latest: attention may multiply by 0 what a
    token must not see, which has to be a number then. So drafts beyond what may count are written as well as
    there are blocks, and beyond these lies the null block, of zeros.
    """

    def __init__(self, drafter: Drafter | None, input_batch: InputBatch) -> None:
        """drafter: None in the stages of a pipeline that sample nothing, where drafts are computed alone."""
        rows, device, k = input_batch.max_num_seqs, input_batch.device, input_batch.draft_ids.shape[1]
        assert k > 0, "an input batch without room for drafts"
        self._drafter, self._input_batch = drafter, input_batch
        self._draft_batch = DraftBatch(
            max_num_seqs=rows,
            max_num_tokens=input_batch.max_num_tokens,
            max_num_samples=input_batch.max_num_samples,
            device=device,
        )
        self._computed = torch.zeros(rows, dtype=torch.int32, device=device)  # by row of the last step
        self._verdict = torch.zeros(len(Verdict._fields), rows, dtype=torch.int32, device=device)
        self._places = torch.arange(k + 1, device=device)
        self.drafts = input_batch.draft_ids
        self._views: dict[int, tuple[Tensor, Tensor, Tensor, Verdict]] = {}  # by the number of rows

    @property
    def wants_aux(self) -> tuple[int, ...]:
        """The layers whose residual sums the drafter is given."""
        return () if self._drafter is None else self._drafter.wants_aux

    def write(self, plan: SchedulerOutput, batch: BatchView) -> DraftRows:
        """Send what a plan says of drafts, for a step that lies in the input batch."""
        return self._draft_batch.write(plan, batch)

    def view(self, batch: BatchView, *, most_drafts: int, num_next: int) -> DraftRows:
        """Where the same would lie, to capture a step."""
        sizes = len(batch.seq_lens), len(batch.token_ids), len(batch.logits_rows)
        return self._draft_batch.view(sizes, most_drafts=most_drafts, num_next=num_next)

    def begin(self, batch: BatchView, rows: DraftRows) -> None:
        """Move positions, slots and lengths on by what was computed beyond what the host knows."""
        if not rows.may_move:
            return
        sources = rows.sources.clamp(min=0)
        ahead = torch.where(rows.sources >= 0, self._computed.index_select(0, sources) - rows.computed, 0)
        is_real = batch.slot_mappings[0] != NO_SLOT  # no padding
        by_token = torch.where(is_real, ahead.index_select(0, rows.token_rows), 0)
        positions = batch.positions + by_token
        is_inside = positions < rows.capacities.index_select(0, rows.token_rows)
        last = (rows.limits.index_select(0, rows.token_rows) - 1).clamp(min=0)  # that angles are known of
        batch.positions.copy_(torch.minimum(positions, last))
        batch.seq_lens.add_(ahead)
        batch.sample_positions.add_(ahead.index_select(0, rows.sample_rows))
        block_size = self._input_batch.block_size
        columns = positions // block_size
        for slots, tables in zip(batch.slot_mappings, batch.block_tables, strict=True):
            blocks = tables[rows.token_rows, columns]
            moved = (blocks - columns) * block_size + positions
            slots.copy_(torch.where(is_inside & is_real, moved, NO_SLOT))

    def finish(
        self,
        batch: BatchView,
        rows: DraftRows,
        hidden: Tensor,
        aux_hidden: Tensor | None,
        request_ids: tuple[str, ...],
    ) -> None:
        """Judge the step's drafts by its samples, keep what holds, and have the next ones proposed."""
        assert self._drafter is not None, "samples in a stage that samples nothing"
        num_rows, num_samples = len(rows.sources), len(batch.sampled)
        newest, computed, drafts, verdict = self._of_rows(num_rows)
        accepted = verdict.accepted
        self._verdict.zero_()
        most = torch.minimum(rows.capacities, rows.limits - 1)  # tokens that may be computed of each row
        if rows.most_drafts and num_samples:
            which = rows.first_samples.unsqueeze(1) + self._places[: rows.most_drafts + 1]
            which.clamp_(max=num_samples - 1)
            sampled = batch.sampled[which]
            self._judge(batch, rows, sampled, which[:, :-1], most, verdict)
            newest.copy_(sampled.gather(1, accepted.long().unsqueeze(1)).squeeze(1))
            torch.minimum(batch.seq_lens - rows.num_drafts + accepted, most, out=computed)
        else:  # most steps where drafts do not pay, which must cost nearly nothing
            sampled = newest.unsqueeze(1)
            torch.minimum(batch.seq_lens, most, out=computed)
            if num_samples:
                torch.index_select(
                    batch.sampled, 0, rows.first_samples.clamp(max=num_samples - 1), out=newest
                )
        if rows.num_next:
            drafts.fill_(NO_DRAFT)
        self._drafter.propose(
            DraftInput(
                batch=batch,
                request_ids=request_ids,
                sampled=sampled,
                num_accepted=accepted,
                newest=newest,
                num_computed=computed,
                num_samples=rows.num_samples,
                first_samples=rows.first_samples,
                capacities=rows.capacities,
                hidden=hidden,
                aux_hidden=aux_hidden,
                num_drafts=rows.num_next,
            ),
            drafts,
        )
        if rows.num_next:
            is_draft = (drafts >= 0).to(torch.int32).cumprod(1)
            torch.sum(is_draft, 1, dtype=torch.int32, out=verdict.proposed)

    def _of_rows(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Verdict]:
        """What a step writes of its rows: newest tokens, tokens computed, drafts, and its verdict."""
        if num_rows not in self._views:
            tensors = self._input_batch.newest, self._computed, self.drafts
            newest, computed, drafts = (tensor[:num_rows] for tensor in tensors)
            self._views[num_rows] = newest, computed, drafts, Verdict(*self._verdict[:, :num_rows])
        return self._views[num_rows]

    def left(self, num_rows: int) -> Tensor:
        """Of each row of the last step tokens that are computed, then drafts, [rows, 1 + k] int32."""
        return torch.cat((self._computed[:num_rows].unsqueeze(1), self.drafts[:num_rows]), 1)

    def verdict(self, num_rows: int) -> Tensor:
        """What became of the last step's drafts, [3, rows] int32 on the device, as Verdict has it."""
        return self._verdict[:, :num_rows]

    def _judge(
        self,
        batch: BatchView,
        rows: DraftRows,
        sampled: Tensor,
        before: Tensor,
        most: Tensor,
        verdict: Verdict,
    ) -> None:
        """A draft holds where all before it do and it is what was sampled in its place.

        before [rows, drafts]: samples in the place of drafts. most [rows]: tokens that may be computed.
        """
        after = batch.logits_rows[before] + 1
        drafts = self._input_batch.taken_ids[after.clamp(max=len(batch.token_ids) - 1)]
        is_own = self._places[: rows.most_drafts] < rows.num_drafts.unsqueeze(1)
        is_inside = batch.sample_positions[before] < most.unsqueeze(1)
        is_draft = is_own & is_inside & (drafts >= 0)
        holds = is_draft & (drafts == sampled[:, :-1])
        torch.sum(holds.to(torch.int32).cumprod(1), 1, dtype=torch.int32, out=verdict.accepted)
        torch.sum(is_draft, 1, dtype=torch.int32, out=verdict.drafted)
