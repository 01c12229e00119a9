"""The arena: the fixed tensors a step is written into, and the only code that writes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .block_pool import NULL_BLOCK
from .request import SamplingParams
from .scheduler import ScheduledRequest, SchedulerOutput

_Ints = NDArray[np.int64]

NO_SLOT = -1  # where a padding token's keys and values go: nowhere


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchView:
    """One step in the arena: tokens, sequences and sampling rows, each with its padding.

    Shapes: token_ids, positions, slot_mapping [padded_tokens]; block_tables [padded_seqs, max_blocks];
    seq_lens [padded_seqs]; query_start_loc [padded_seqs + 1]; the rest [padded_samples], in the plan's order.
    """

    num_tokens: int
    num_seqs: int
    num_samples: int
    max_query_len: int
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    logits_rows: Tensor  # which tokens' hidden states are sampled from
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    sample_positions: Tensor  # where the sampled tokens will stand: the counters of their noise
    banned: tuple[tuple[int, tuple[int, ...]], ...]  # (sampling row, ids it must not sample)
    any_random: bool  # some row is not greedy
    any_filter: bool  # some row that is not greedy uses top_k, top_p or min_p


class InputBatch:
    """Writes plans into tensors that never move, so that captured graphs can read them.

    A padding token has id 0, position 0 and slot -1; a padding sequence has length 0; unused table entries
    are the null block; a sampling row beyond the last is greedy on token 0. Nothing of an earlier step shows.
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
    ) -> None:
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._token_ids = _Field(torch.int32, device, max_num_tokens)
        self._positions = _Field(torch.int32, device, max_num_tokens)
        self._slot_mapping = _Field(torch.int32, device, max_num_tokens)
        self._block_tables = _Field(torch.int32, device, max_num_seqs, max_blocks_per_seq)
        self._seq_lens = _Field(torch.int32, device, max_num_seqs)
        self._query_start_loc = _Field(torch.int32, device, max_num_seqs + 1)
        self._logits_rows = _Field(torch.int32, device, max_num_seqs)
        self._temperature = _Field(torch.float32, device, max_num_seqs)
        self._top_k = _Field(torch.int32, device, max_num_seqs)
        self._top_p = _Field(torch.float32, device, max_num_seqs)
        self._min_p = _Field(torch.float32, device, max_num_seqs)
        self._seeds = _Field(torch.int64, device, max_num_seqs)
        self._sample_positions = _Field(torch.int64, device, max_num_seqs)
        self._forget()

    def _forget(self) -> None:
        """Take nothing for granted of what the arena holds."""
        self._block_tables.array[:] = NULL_BLOCK
        self._tables: list[tuple[int, ...]] = [()] * self.max_num_seqs  # what each row of it holds,
        self._table_ids: list[str] = []  # and for whom the first rows were written
        self._params: list[SamplingParams] | None = None  # what the sampling rows hold
        self._any_random = False
        self._any_filter = False

    def write(
        self,
        plan: SchedulerOutput,
        padded_tokens: int | None = None,
        padded_seqs: int | None = None,
        padded_samples: int | None = None,
    ) -> BatchView:
        """Put a step into the arena, padded to these sizes, and return where it lies."""
        try:
            return self._write(plan, padded_tokens, padded_seqs, padded_samples)
        except BaseException:  # an interrupt may come between a row and the note of what it holds
            self._forget()
            raise

    def _write(
        self,
        plan: SchedulerOutput,
        padded_tokens: int | None,
        padded_seqs: int | None,
        padded_samples: int | None,
    ) -> BatchView:
        num_tokens, num_seqs = plan.num_tokens, len(plan.requests)
        padded_tokens = num_tokens if padded_tokens is None else padded_tokens
        padded_seqs = num_seqs if padded_seqs is None else padded_seqs
        assert num_tokens <= padded_tokens <= self.max_num_tokens, f"{num_tokens} tokens in {padded_tokens}"
        assert num_seqs <= padded_seqs <= self.max_num_seqs, f"{num_seqs} sequences in {padded_seqs}"

        counts = np.fromiter((len(r.token_ids) for r in plan.requests), np.int64, num_seqs)
        computed = np.fromiter((r.num_computed_tokens for r in plan.requests), np.int64, num_seqs)
        assert counts.sum() == num_tokens, (counts, num_tokens)
        self._move_tables([r.request_id for r in plan.requests])
        self._write_tables([r.block_ids for r in plan.requests], padded_seqs)
        self._write_lengths(counts, computed, padded_seqs)
        self._write_tokens(plan.requests, counts, computed, padded_tokens)
        sampled = self._write_sampling(plan.requests, counts, computed)
        num_rows = len(sampled) if padded_samples is None else padded_samples
        assert len(sampled) <= num_rows <= self.max_num_seqs, f"{len(sampled)} samples in {num_rows}"
        return BatchView(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_samples=len(sampled),
            max_query_len=int(counts.max(initial=0)),
            token_ids=self._token_ids.send(padded_tokens),
            positions=self._positions.send(padded_tokens),
            slot_mapping=self._slot_mapping.send(padded_tokens),
            block_tables=self._block_tables.send(padded_seqs),
            seq_lens=self._seq_lens.send(padded_seqs),
            query_start_loc=self._query_start_loc.send(padded_seqs + 1),
            logits_rows=self._logits_rows.send(num_rows),
            temperature=self._temperature.send(num_rows),
            top_k=self._top_k.send(num_rows),
            top_p=self._top_p.send(num_rows),
            min_p=self._min_p.send(num_rows),
            seeds=self._seeds.send(num_rows),
            sample_positions=self._sample_positions.send(num_rows),
            banned=self._banned(sampled),
            any_random=self._any_random,
            any_filter=self._any_filter,
        )

    def _move_tables(self, request_ids: list[str]) -> None:
        """Bring rows along with the requests that moved; a new request gets any row, to be overwritten."""
        if request_ids != self._table_ids:
            row_of = {request_id: row for row, request_id in enumerate(self._table_ids)}
            sources = [row_of.get(request_id, 0) for request_id in request_ids]
            self._block_tables.array[: len(sources)] = self._block_tables.array[sources]
            self._tables[: len(sources)] = [self._tables[row] for row in sources]
            self._table_ids = request_ids

    def _write_tables(self, tables: Sequence[tuple[int, ...]], padded_seqs: int) -> None:
        """Rewrite each row where it changed: in most steps, few tables do, and they only grew."""
        rows = self._block_tables.array
        for row, table in enumerate(chain(tables, [()] * (padded_seqs - len(tables)))):
            held = self._tables[row]
            if held is not table:
                kept = len(held) if table[: len(held)] == held else 0
                rows[row, kept : len(table)] = table[kept:]
                rows[row, len(table) : len(held)] = NULL_BLOCK
                self._tables[row] = table

    def _write_lengths(self, counts: _Ints, computed: _Ints, padded_seqs: int) -> None:
        num_seqs = len(counts)
        self._seq_lens.fill(computed + counts, padded_seqs, padding=0)
        starts = self._query_start_loc.array
        starts[0] = 0
        starts[1 : num_seqs + 1] = np.cumsum(counts)
        starts[num_seqs + 1 : padded_seqs + 1] = starts[num_seqs]

    def _write_tokens(
        self, requests: Sequence[ScheduledRequest], counts: _Ints, computed: _Ints, padded_tokens: int
    ) -> None:
        num_tokens = int(counts.sum())
        token_ids = np.fromiter(chain.from_iterable(r.token_ids for r in requests), np.int32, num_tokens)
        rows = np.repeat(np.arange(len(counts)), counts)
        starts = np.cumsum(counts) - counts
        positions = np.arange(num_tokens) + (computed - starts)[rows]
        block_ids = self._block_tables.array[rows, positions // self.block_size]
        self._token_ids.fill(token_ids, padded_tokens, padding=0)
        self._positions.fill(positions, padded_tokens, padding=0)
        self._slot_mapping.fill(
            block_ids * self.block_size + positions % self.block_size, padded_tokens, padding=NO_SLOT
        )

    def _write_sampling(
        self, requests: Sequence[ScheduledRequest], counts: _Ints, computed: _Ints
    ) -> list[ScheduledRequest]:
        """The rows to sample, and the requests they belong to."""
        rows = [row for row, r in enumerate(requests) if r.samples]
        sampled = [requests[row] for row in rows]
        self._logits_rows.fill(np.cumsum(counts)[rows] - 1, self.max_num_seqs, padding=0)
        self._sample_positions.fill((computed + counts)[rows], self.max_num_seqs, padding=0)
        params = [r.params for r in sampled]
        if params != self._params:
            self._write_params(params)
        return sampled

    def _write_params(self, params: list[SamplingParams]) -> None:
        size = self.max_num_seqs
        temperature = self._temperature.fill(_column(params, "temperature"), size, padding=0)
        top_p = self._top_p.fill(_column(params, "top_p"), size, padding=1)
        min_p = self._min_p.fill(_column(params, "min_p"), size, padding=0)
        top_k = self._top_k.fill([self._top_k_or_off(p) for p in params], size, padding=0)
        self._seeds.fill(np.fromiter((p.seed for p in params), np.int64, len(params)), size, padding=0)
        random = temperature > 0
        self._any_random = bool(random.any())
        self._any_filter = bool((random & ((top_k > 0) | (top_p < 1) | (min_p > 0))).any())
        self._params = params

    def _top_k_or_off(self, params: SamplingParams) -> int:
        assert params.top_k is not None, "unresolved parameters"
        return params.top_k if 0 < params.top_k < self.vocab_size else 0

    def _banned(self, sampled: Sequence[ScheduledRequest]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The ids each row must not sample, less those the model has not: its tokenizer may know more."""
        rows = ((row, r.banned_token_ids) for row, r in enumerate(sampled) if r.banned_token_ids)
        known = ((row, tuple(id_ for id_ in ids if id_ < self.vocab_size)) for row, ids in rows)
        return tuple((row, ids) for row, ids in known if ids)


class _Field:
    """One tensor of the arena and the host memory it is written through; one and the same on CPU."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *shape: int) -> None:
        on_host = device.type == "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=not on_host)
        self._tensor = self._host if on_host else torch.zeros(shape, dtype=dtype, device=device)
        self.array: NDArray[Any] = self._host.numpy()

    def fill(self, values: Sequence[int] | NDArray[Any], size: int, *, padding: int) -> NDArray[Any]:
        """Values, then padding up to a size; returns the values as stored."""
        self.array[: len(values)] = values
        self.array[len(values) : size] = padding
        return self.array[: len(values)]

    def send(self, size: int) -> Tensor:
        """The first rows, on their way to the device; the next write must wait until they have arrived."""
        if self._tensor is not self._host:
            self._tensor[:size].copy_(self._host[:size], non_blocking=True)
        return self._tensor[:size]


def _column(params: Sequence[SamplingParams], name: str) -> NDArray[np.float32]:
    return np.fromiter(map(attrgetter(name), params), np.float32, len(params))
