"""The input batch: the fixed tensors a step is written into, and the only code that writes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..protocol.scheduler_output import (
    NULL_BLOCK,
    ON_HOST,
    Banned,
    Ints,
    SchedulerOutput,
    WantedLogprobs,
)
from .logprobs import LogprobRows
from .staging import fill, send, staging

NO_ID = -1  # in place of a banned id
MAX_BANNED = 32  # ids a row that have room here; a step with more has a tensor of its own, and no CUDA graph
NO_SLOT = -1  # where a padding token's keys and values go: nowhere
ALIGNMENT = 16  # of every field, in int32: what kernels that load vectors may count on, and more
MAX_LAYOUTS = 1024  # remembered; those of CUDA graphs are fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchView:
    """One step in the input batch: tokens, sequences and sampling rows, each with its padding.

    Shapes: token_ids, token_sources, positions [padded_tokens]; of each KV-cache group slot_mappings
    [padded_tokens] and block_tables [padded_seqs, max_blocks]; seq_lens [padded_seqs]; query_start_loc
    [padded_seqs + 1]; the rest [padded_samples], in the plan's order. All int32 but for temperature, top_p
    and min_p (float32), seeds and sample_positions (int64). Token ids are there once
    InputBatch.take_token_ids has run, after the step before.
    """

    num_tokens: int
    num_seqs: int
    num_samples: int
    max_query_len: int  # the most tokens that a sequence has in this step
    token_ids: Tensor
    token_sources: Tensor  # where in the input batch's memory each token's id lies
    positions: Tensor
    slot_mappings: tuple[Tensor, ...]  # where each token's keys and values go; NO_SLOT of padding
    block_tables: tuple[Tensor, ...]
    seq_lens: Tensor  # tokens of each sequence with this step's
    query_start_loc: Tensor  # where each sequence's tokens begin, and where the last one's end
    logits_rows: Tensor  # which tokens' hidden states are sampled from
    sampled: Tensor  # where the step leaves its samples, for the next one to find them
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    sample_positions: Tensor  # where the sampled tokens will stand: the counters of their noise
    banned: Tensor  # [padded_samples, any number] ids that a row must not sample, and NO_ID
    logprobs: LogprobRows | None = None  # whose log-probabilities are wanted
    is_drawn: bool = True  # whether any sample is a token
    is_greedy: bool = False  # whether all are the likeliest ids, and nothing else is asked of logits


class InputBatch:
    """Writes plans into tensors that never move, so that captured graphs can read them.

    What changes with every step is written on the host, packed by the step's sizes, and sent in one copy; so
    where a field lies depends on the sizes. Of block tables and sampling parameters only changes are sent.
    Everything is sent on the current stream, from memory that is not written again before it has left.

    A padding token has id 0, position 0 and slot -1; a padding sequence has length 0; a sampling row beyond
    the last is greedy on token 0. Entries of a block table beyond a sequence's length are never read.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks_per_seq: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        num_groups: int = 1,
        max_drafts: int = 0,
        max_num_samples: int | None = None,
    ) -> None:
        """max_drafts: of a row, if there is a drafter; max_num_samples: of a step, one a sequence if None."""
        self.device = device
        self.max_num_samples = max_num_seqs if max_num_samples is None else max_num_samples
        self._num_groups = num_groups  # KV-cache groups: of layers, each with block tables of its own
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.max_seq_len = max_blocks_per_seq * block_size
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._tables = np.full((self._num_groups * max_num_seqs, max_blocks_per_seq), NULL_BLOCK, np.int32)
        self._block_tables = torch.zeros(self._tables.shape, dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        samples = self.max_num_samples
        # The last step's samples, the newest token and the drafts of each of its rows, where there is a
        # drafter, and then the host's token ids, in one tensor: a token comes from any of these.
        self._first_newest = _aligned(samples)
        self._first_draft = self._first_newest + (_aligned(max_num_seqs) if max_drafts else 0)
        self._first_packed = self._first_draft + _aligned(max_num_seqs * max_drafts)
        size = self._first_packed + self._layout_of(max_num_tokens, max_num_seqs, samples).size
        self._memory = torch.zeros(size, dtype=torch.int32, device=device)
        self.newest = self._memory[self._first_newest : self._first_newest + max_num_seqs]
        drafts = self._memory[self._first_draft : self._first_draft + max_num_seqs * max_drafts]
        self.draft_ids = drafts.view(max_num_seqs, max_drafts)
        # As they are, where token_ids has id 0 in place of none.
        self.taken_ids = torch.zeros_like(self._token_ids) if max_drafts else self._token_ids
        self._places = np.zeros(0, np.int64)  # of the newest tokens of the last step's rows, in that memory
        self._sampling = torch.zeros(6, samples, dtype=torch.int32, device=device)
        self._banned = torch.full((samples, MAX_BANNED), NO_ID, dtype=torch.int32, device=device)
        self._layouts: dict[tuple[int, int, int], tuple[_Layout, dict[str, Any]]] = {}
        self.forget()

    def forget(self) -> None:
        """Take nothing for granted of what the device holds of sampling parameters."""
        self._sampling_held: NDArray[np.void] | None = None
        self._banned_held: Banned | None = None

    def write(
        self,
        plan: SchedulerOutput,
        padded_tokens: int | None = None,
        padded_seqs: int | None = None,
        padded_samples: int | None = None,
    ) -> BatchView:
        """Write a step, padded to these sizes (None: its own), and return where it lies.

        An AssertionError says that the step does not fit; nothing is written then.
        """
        sizes = (
            plan.num_tokens if padded_tokens is None else padded_tokens,
            plan.num_rows if padded_seqs is None else padded_seqs,
            plan.num_samples if padded_samples is None else padded_samples,
        )
        self._check_sizes(plan, *sizes)
        self._update_tables(plan.new_blocks)
        self._update_sampling(plan.sampling)
        layout, views = self._layout(sizes)
        self._send_fields(plan, layout)
        return BatchView(
            num_tokens=plan.num_tokens,
            num_seqs=plan.num_rows,
            num_samples=plan.num_samples,
            max_query_len=int(plan.num_scheduled_tokens.max(initial=0)),
            banned=self._update_banned(plan.banned, sizes[2]),
            logprobs=None if plan.wanted_logprobs is None else self._send_logprob_rows(plan.wanted_logprobs),
            is_drawn=plan.is_drawn,
            is_greedy=plan.is_greedy,
            **views,
        )

    def sampled(self, num: int) -> Tensor:
        """The samples [num] int32 of the last step that was launched, on the device."""
        return self._memory[:num]

    @contextmanager
    def samples_kept(self) -> Iterator[None]:
        """What the last step left on the device for the next one is there again behind other steps."""
        places, left = self._places, self._memory[: self._first_packed]
        kept = left.clone()
        try:
            yield
        finally:
            left.copy_(kept)
            self._places = places

    def take_token_ids(self, view: BatchView) -> None:
        """Gather a step's token ids on the device, from the host's and the samples of the step before."""
        taken = self.taken_ids[: len(view.token_ids)]
        torch.index_select(self._memory, 0, view.token_sources, out=taken)
        # -1 of a row without a token, which ends when the host has read it, and in place of a draft
        torch.clamp(taken, min=0, out=view.token_ids)

    def _check_sizes(self, plan: SchedulerOutput, tokens: int, seqs: int, samples: int) -> None:
        assert plan.num_tokens <= tokens <= self.max_num_tokens, f"{plan.num_tokens} tokens in {tokens}"
        assert plan.num_rows <= seqs <= self.max_num_seqs, f"{plan.num_rows} sequences in {seqs}"
        assert plan.num_samples <= samples <= self.max_num_samples, f"{plan.num_samples} samples in {samples}"

    def _update_tables(self, new_blocks: Ints) -> None:
        """Set what is new in the block tables."""
        if num := new_blocks.shape[1]:
            rows, columns, blocks = new_blocks
            self._tables[rows, columns] = blocks
            entries = np.empty(3 * num, np.int32)  # table entries by number, as int64, then block ids
            entries[: 2 * num].view(np.int64)[:] = rows * self._tables.shape[1] + columns
            entries[2 * num :] = blocks
            sent = self._send(entries)
            self._block_tables.view(-1).index_copy_(0, sent[: 2 * num].view(torch.int64), sent[2 * num :])

    def _update_sampling(self, sampling: NDArray[np.void]) -> None:
        held = self._sampling_held
        if sampling is held or (held is not None and sampling.tobytes() == held.tobytes()):
            return
        self._sampling_held = None  # an interrupt may come before all is sent
        fields = np.zeros((6, self.max_num_samples), np.int32)
        num = len(sampling)
        top_k = np.where(sampling["top_k"] < self.vocab_size, sampling["top_k"], 0)
        fields[0, :num] = sampling["temperature"].view(np.int32)
        fields[1, :num] = top_k
        fields[2] = np.float32(1).view(np.int32)
        fields[2, :num] = sampling["top_p"].view(np.int32)
        fields[3, :num] = sampling["min_p"].view(np.int32)
        fields[4:].reshape(-1).view(np.int64)[:num] = sampling["seed"]
        self._sampling.copy_(self._send(fields))
        self._sampling_held = sampling

    def _update_banned(self, banned: Banned, num_rows: int) -> Tensor:
        """The ids each row must not sample, less those the model has not: its tokenizer may know more."""
        if not fits_captured(banned):
            return self._send(self._banned_table(banned, num_rows, max(len(ids) for _, ids in banned)))
        if banned != self._banned_held:
            self._banned_held = None
            self._banned.copy_(self._send(self._banned_table(banned, self.max_num_samples, MAX_BANNED)))
            self._banned_held = banned
        return self._banned[:num_rows]

    def _banned_table(self, banned: Banned, num_rows: int, width: int) -> NDArray[np.int32]:
        table = np.full((num_rows, width), NO_ID, np.int32)
        for row, ids in banned:
            known = [id_ for id_ in ids if id_ < self.vocab_size]
            table[row, : len(known)] = known
        return table

    def _send_logprob_rows(self, wanted: WantedLogprobs) -> LogprobRows:
        samples, before, targets = wanted.samples, wanted.before, wanted.targets
        return LogprobRows(wanted.num_top, self._send(samples), self._send(before), self._send(targets))

    def _send_fields(self, plan: SchedulerOutput, layout: "_Layout") -> None:
        packed = staging(layout.size, self.device)
        self._fill(packed.numpy(), plan, layout)
        start = self._first_packed
        self._memory[start : start + layout.size].copy_(packed, non_blocking=True)

    def _fill(self, packed: NDArray[np.int32], plan: SchedulerOutput, layout: "_Layout") -> None:
        counts, computed = plan.num_scheduled_tokens, plan.num_computed_tokens
        num_tokens, num_rows = plan.num_tokens, plan.num_rows
        ends = np.cumsum(counts)
        rows = np.arange(num_rows)
        positions = computed
        if num_tokens > num_rows:
            rows = np.repeat(rows, counts)
            positions = np.arange(num_tokens) + (computed - ends + counts)[rows]
        seq_lens = computed + counts
        newest, logits_rows, sample_positions = _sampled(plan, ends, seq_lens)
        on_device = plan.sources != ON_HOST
        sources = packed[layout.token_sources]
        sources[:] = np.arange(self._first_packed, self._first_packed + len(sources))
        sources[newest[on_device]] = self._places[plan.sources[on_device]]
        if plan.drafts is not None:
            self._find_drafts(sources, plan.drafts.sources, plan.num_sampled_tokens, newest)
        self._places = self._places_after(plan)
        fill(packed, layout.token_ids, plan.token_ids, padding=0)
        fill(packed, layout.positions, positions, padding=0)
        columns = np.minimum(positions // self.block_size, self._tables.shape[1] - 1)  # of fillers beyond
        for group, field in enumerate(layout.slot_mappings(self._num_groups)):
            blocks = self._tables[group * self.max_num_seqs + rows, columns]
            slots = (blocks - columns) * self.block_size + positions
            fill(packed, field, slots, padding=NO_SLOT)
        fill(packed, layout.seq_lens, seq_lens, padding=0)
        packed[layout.query_start_loc.start] = 0
        starts = slice(layout.query_start_loc.start + 1, layout.query_start_loc.stop)
        fill(packed, starts, ends, padding=num_tokens)
        fill(packed, layout.logits_rows, logits_rows, padding=0)
        longs = packed[layout.sample_positions].view(np.int64)
        fill(longs, slice(0, len(longs)), sample_positions, padding=0)

    def _find_drafts(self, sources: NDArray[np.int32], rows: Ints, num_sampled: Ints, newest: Ints) -> None:
        """Have the tokens after the newest of each row come from the drafts of these rows before, if any."""
        k = self.draft_ids.shape[1]
        for place in range(int(num_sampled.max(initial=0)) - 1):
            drafting = (rows >= 0) & (num_sampled > place + 1)
            sources[newest[drafting] + place + 1] = self._first_draft + rows[drafting] * k + place

    def _places_after(self, plan: SchedulerOutput) -> Ints:
        """Where a step leaves the newest token of each row that samples."""
        if self.draft_ids.shape[1]:
            return np.arange(self._first_newest, self._first_newest + plan.num_rows)
        places: Ints = np.cumsum(plan.num_sampled_tokens) - 1
        return places

    def _layout(self, sizes: tuple[int, int, int]) -> tuple["_Layout", dict[str, Any]]:
        """Where the fields of a step of these sizes lie; the same tensors for the same sizes."""
        found = self._layouts.get(sizes)
        if found is None:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layout_of(*sizes)
            found = self._layouts[sizes] = layout, self._views(layout, *sizes)
        return found

    def _layout_of(self, tokens: int, seqs: int, samples: int) -> "_Layout":
        return _Layout.of(tokens, seqs, samples, self._num_groups)

    def _views(self, layout: "_Layout", tokens: int, seqs: int, samples: int) -> dict[str, Any]:
        packed, floats = self._memory[self._first_packed :], self._sampling.view(torch.float32)
        starts = range(0, len(self._tables), self.max_num_seqs)
        return {
            "token_ids": self._token_ids[:tokens],
            "token_sources": packed[layout.token_sources],
            "positions": packed[layout.positions],
            "slot_mappings": tuple(packed[field] for field in layout.slot_mappings(self._num_groups)),
            "block_tables": tuple(self._block_tables[start : start + seqs] for start in starts),
            "seq_lens": packed[layout.seq_lens],
            "query_start_loc": packed[layout.query_start_loc],
            "logits_rows": packed[layout.logits_rows],
            "sampled": self._memory[:samples],
            "temperature": floats[0, :samples],
            "top_k": self._sampling[1, :samples],
            "top_p": floats[2, :samples],
            "min_p": floats[3, :samples],
            "seeds": self._sampling[4:].view(-1).view(torch.int64)[:samples],
            "sample_positions": packed[layout.sample_positions].view(torch.int64),
        }

    def _send(self, values: NDArray[Any]) -> Tensor:
        return send(values, self.device)


class _Layout(NamedTuple):
    """Where each field of a step of certain sizes lies in packed memory, in int32."""

    token_ids: slice  # the first, so that they begin at the same address for all sizes
    token_sources: slice
    positions: slice
    all_slot_mappings: slice  # of all groups, each as far as the first
    seq_lens: slice
    query_start_loc: slice
    logits_rows: slice
    sample_positions: slice  # of int64
    size: int

    @staticmethod
    def of(tokens: int, seqs: int, samples: int, num_groups: int) -> "_Layout":
        start = 0
        fields: list[Any] = []
        slots = num_groups * _aligned(tokens)
        for length in (*[tokens] * 3, slots, seqs, seqs + 1, samples, 2 * samples):
            fields.append(slice(start, start + length))
            start = _aligned(start + length)
        return _Layout._make([*fields, start])

    def slot_mappings(self, num_groups: int) -> list[slice]:
        """Where each KV-cache group has its slot mapping."""
        tokens, first = self.token_ids.stop - self.token_ids.start, self.all_slot_mappings.start
        starts = [first + group * _aligned(tokens) for group in range(num_groups)]
        return [slice(start, start + tokens) for start in starts]


def _sampled(plan: SchedulerOutput, ends: Ints, seq_lens: Ints) -> tuple[Ints, Ints, Ints]:
    """Of each row the index of its newest known token; of each sample that of the token before, its position.

    ends and seq_lens [num_rows]: of each row where its tokens end among the step's, and how many there are.
    """
    if plan.is_decode:
        last = ends - 1
        return last, last, seq_lens
    num_sampled = plan.num_sampled_tokens
    samples = num_sampled > 0
    if np.count_nonzero(samples) == plan.num_samples:  # no drafts
        last = ends - 1
        return last, last[samples], seq_lens[samples]
    # Of each sample, how many tokens of its row there are from the one that it comes after.
    left = np.repeat(np.cumsum(num_sampled), num_sampled) - np.arange(plan.num_samples)
    newest = ends - np.maximum(num_sampled, 1)
    return newest, np.repeat(ends, num_sampled) - left, np.repeat(seq_lens, num_sampled) - left + 1


def fits_captured(banned: Banned) -> bool:
    """Whether banned ids have room where a captured step reads them."""
    return all(len(ids) <= MAX_BANNED for _, ids in banned)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
