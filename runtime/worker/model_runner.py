"""Runs one scheduled step on the device: the arena, the forward, the logits of the last rows, the sampler."""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...common.errors import LaminaError
from ...compiler.execution.cpu_call_graph import Tapes
from ...compiler.execution.cuda_graphs import CudaGraphs
from ...compiler.execution.plan import BoundPlan
from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import SchedulerOutput, no_requests
from ..sampling_params import LogitsProcessor
from .attention import PagedAttention
from .broken_logits import failed_prompts, failed_samples
from .host_blocks import HostBlocks
from .input_batch import BatchView, InputBatch, fits_recording
from .logits_adjuster import Adjuster
from .logprobs import Tables, report_prompts, report_samples
from .sampler import rows_of, sample

Forward = Callable[[Tensor, Tensor, PagedAttention], Tensor]  # token_ids [T], positions [T] -> hidden [T, H]
Logits = Callable[[Tensor], Tensor]  # hidden [n, H] -> [n, vocab]


@dataclass(frozen=True, slots=True)
class Decode:
    """A recording of a whole step of `size` requests with one token each, sampling included."""

    size: int


@dataclass(frozen=True, slots=True)
class Mixed:
    """A recording of the pieces for `size` tokens of any requests."""

    size: int


class LaunchedStep:
    """A step that was launched; its tokens are read when they are needed."""

    def __init__(
        self,
        plan: SchedulerOutput,
        sampled: Tensor,
        tables: Tables | None,
        arrived: torch.cuda.Event | None,
        failures: Mapping[str, LaminaError],
    ) -> None:
        self._plan = plan
        self._sampled = sampled
        self._tables = tables
        self._arrived = arrived
        self._failures = failures

    def read(self) -> RunnerOutput:
        """What the step came to, waiting for the device where it is still at work.

        A token of a request that failed means nothing.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids: NDArray[np.int32] = self._sampled.numpy()
        return RunnerOutput(
            token_ids=token_ids,
            reports=None if self._tables is None else self._tables.read(),
            failures=self._all_failures(token_ids),
        )

    def _all_failures(self, token_ids: NDArray[np.int32]) -> Mapping[str, LaminaError]:
        failures: dict[str, LaminaError] = {**failed_samples(self._plan, token_ids), **self._failures}
        if self._tables is not None and self._tables.prompts:
            failures |= failed_prompts(self._plan, self._tables.prompts[-1])
        return failures


class ModelRunner:
    """Owns the KV tensors through `attention`; everything else of a step lives in the arena."""

    def __init__(
        self,
        *,
        forward: Forward,
        logits: Logits,
        attention: PagedAttention,
        arena: InputBatch,
        num_valid_ids: int,
        graphs: CudaGraphs | None = None,
        tapes: Tapes | None = None,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        self._forward = forward
        self._logits = logits
        self._attention = attention
        self._arena = arena
        self._num_valid_ids = num_valid_ids
        self._adjuster = Adjuster(
            num_valid_ids=num_valid_ids,
            device=arena.device,
            max_slots=arena.max_num_seqs,
            max_tokens=arena.max_seq_len,
        )
        self._graphs = graphs
        self._tapes = tapes
        self.host_blocks = host_blocks
        self._decode_sizes: tuple[int, ...] = ()
        self._mixed_sizes: tuple[int, ...] = ()
        self._to_record: deque[Decode | Mixed] = deque()
        self._num_eager_steps = 0
        self._tables: Tables | None = None  # what the last step reports
        self._failures: Mapping[str, LaminaError] = {}  # of requests in the last step

    def add_request(self, request_id: str, logits_processors: Sequence[LogitsProcessor]) -> None:
        """Know a request's own logits processors by its id, until remove_request."""
        self._adjuster.processors[request_id] = logits_processors

    def remove_request(self, request_id: str) -> None:
        """Let go of what add_request brought, if anything."""
        self._adjuster.processors.pop(request_id, None)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> LaunchedStep:
        """Launch one step and return at once with the means to read what it came to."""
        try:
            self._tables = Tables() if plan.reports is not None else None
            self._failures = {}
            if any(plan.copies):
                assert self.host_blocks is not None, "blocks are to be copied to a host without slots"
                self.host_blocks.copy(plan.copies)
            self._launch(plan)
            return self._handle(plan)
        except BaseException:
            self._arena.forget()
            self._adjuster.forget()
            raise

    def _launch(self, plan: SchedulerOutput) -> None:
        """Compute the step's logits and leave its samples in the arena."""
        is_decode = plan.num_tokens == plan.num_rows == plan.num_samples
        if (
            is_decode
            and fits_recording(plan.banned)
            and (size := _fitting(self._decode_sizes, plan.num_tokens))
        ):
            batch = self._arena.write(plan, size, size, size)
            logits = self._replay_decode(batch, size)
        elif size := _fitting(self._mixed_sizes, plan.num_tokens):
            batch = self._arena.write(plan, padded_tokens=size)
            self._attention.begin(batch)
            self._arena.take_token_ids(batch)
            logits = self._sample(batch, self._replay_mixed(batch, size))
        else:
            self._num_eager_steps += 1
            batch = self._arena.write(plan)
            logits = self._run(batch)
        if plan.adjusted is not None:
            assert logits is not None, "samples of a step without any"
            self._failures = self._adjuster.choose(plan.adjusted, batch, logits)
        if batch.reports is not None and self._tables is not None and logits is not None:
            samples = report_samples(batch.reports, logits, batch.sampled, self._num_valid_ids)
            self._tables = self._tables._replace(samples=samples)

    def plan_recordings(self, decode_sizes: Sequence[int], mixed_sizes: Sequence[int]) -> int:
        """Note which sizes are to be recorded; the largest first, so that smaller ones fit into it."""
        mixed = sorted(mixed_sizes if isinstance(self._forward, BoundPlan) else ())
        self._to_record.extend(Mixed(size) for size in mixed[::-1])
        self._to_record.extend(Decode(size) for size in sorted(decode_sizes)[::-1])
        return len(self._to_record)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Record one size, which steps use from then on; False where none is left. No step may be running."""
        if not self._to_record:
            return False
        assert self._graphs is not None, "no graphs to record into"
        key = self._to_record[0]
        self._record(self._graphs, key)
        self._to_record.popleft()
        if isinstance(key, Decode):
            self._decode_sizes = tuple(sorted((*self._decode_sizes, key.size)))
        else:
            self._mixed_sizes = tuple(sorted((*self._mixed_sizes, key.size)))
        return True

    def drop_captures(self) -> None:
        """Drop every recording and its memory; the sizes are to be recorded again."""
        if self._graphs is not None:
            self._graphs.close()
        if self._tapes is not None:
            self._tapes.forget()
        decode, mixed = self._decode_sizes, self._mixed_sizes
        left = [key.size for key in self._to_record if isinstance(key, Mixed)]
        left_decode = [key.size for key in self._to_record if isinstance(key, Decode)]
        self._to_record.clear()
        self._decode_sizes = self._mixed_sizes = ()
        self.plan_recordings((*decode, *left_decode), (*mixed, *left))

    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Run the largest step there can be on padding, to see what memory it takes beside the cache."""
        padding = self._arena.write(no_requests(), num_tokens, num_seqs, num_seqs)
        with torch.inference_mode():
            self._run(dataclasses.replace(padding, max_query_len=num_tokens))  # loads prefill's kernels too

    @property
    def num_eager_steps(self) -> int:
        """Steps that no recording served."""
        return self._num_eager_steps - self.num_taped_steps

    @property
    def num_taped_steps(self) -> int:
        """Decode steps on a CPU that were the recorded calls of their kernels."""
        return self._tapes.num_replays if self._tapes else 0

    def _record(self, graphs: CudaGraphs, key: Decode | Mixed) -> None:
        """Run once, so that modules and workspaces are loaded, then record."""
        if isinstance(key, Mixed):
            padding = self._arena.write(no_requests(), key.size, 1)
            batch = dataclasses.replace(padding, max_query_len=key.size)
            self._attention.begin(batch)
            plan = self._forward
            assert isinstance(plan, BoundPlan)
            plan(batch.token_ids, batch.positions, self._attention)
            graphs.record_pieces(key, plan, batch.token_ids, batch.positions, self._attention)
            return
        padding = self._arena.write(no_requests(), key.size, key.size, key.size)
        batch = dataclasses.replace(padding, max_query_len=1)
        self._run(batch)
        graphs.record(key, lambda: self._run(batch), _reads(batch))

    def _replay_decode(self, batch: BatchView, size: int) -> Tensor | None:
        """The logits that the samples were taken from, in memory that the next replay uses again."""
        assert self._graphs is not None
        padded = size - batch.num_tokens
        logits: Tensor | None = self._graphs.replay(
            Decode(size), _reads(batch), num_tokens=batch.num_tokens, num_padded=padded
        )
        return logits

    def _replay_mixed(self, batch: BatchView, size: int) -> Tensor:
        assert self._graphs is not None
        hidden: Tensor = self._graphs.replay(
            Mixed(size),
            (batch.token_ids, batch.positions),
            num_tokens=batch.num_tokens,
            num_padded=size - batch.num_tokens,
        )
        return hidden

    def _run(self, batch: BatchView) -> Tensor | None:
        """The step without a recording, or while it is recorded; returns its logits."""
        self._attention.begin(batch)
        self._arena.take_token_ids(batch)
        return self._sample(batch, self._hidden(batch))

    def _hidden(self, batch: BatchView) -> Tensor:
        """Hidden states [T, H], good until the next step."""
        inputs = batch.token_ids, batch.positions
        if self._tapes is None or not batch.max_query_len == 1 == batch.num_tokens / batch.num_seqs:
            return self._forward(*inputs, self._attention)
        tables = batch.slot_mapping, batch.block_tables, *batch.side_slots, *batch.side_tables
        reads = (*inputs, *tables, batch.seq_lens, batch.query_start_loc)
        return self._tapes.forward(*inputs, self._attention, reads)

    def _sample(self, batch: BatchView, hidden: Tensor) -> Tensor | None:
        """Leave a token a sampling row in the arena, where the next step finds it; returns the logits."""
        if batch.reports is not None:
            prompts = report_prompts(batch.reports, hidden, self._logits, self._num_valid_ids)
            self._tables = Tables(prompts=prompts)
        if not batch.logits_rows.shape[0]:
            return None
        logits = self._logits(hidden.index_select(0, batch.logits_rows))
        sample(logits, rows_of(batch, self._num_valid_ids), batch.sampled)
        return logits

    def _handle(self, plan: SchedulerOutput) -> LaunchedStep:
        """Start the tokens on their way to the host: the next step overwrites where they are."""
        sampled, tables = self._arena.sampled(plan.num_samples), self._tables
        if sampled.device.type != "cuda":
            return LaunchedStep(plan, sampled.clone(), tables, None, self._failures)
        staged = _on_its_way(sampled)
        tables = tables and tables.each(_on_its_way)
        arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return LaunchedStep(plan, staged, tables, arrived, self._failures)


def _fitting(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest recorded size that holds so many, None where there is none."""
    return next((size for size in sizes if size >= wanted), None)


def _on_its_way(values: Tensor) -> Tensor:
    """A copy in pinned memory, which is there when all that was launched is over."""
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def _reads(batch: BatchView) -> tuple[Tensor, ...]:
    """What a recorded decode step reads from the arena, and where it leaves its samples."""
    return (
        batch.token_sources,
        batch.positions,
        batch.slot_mapping,
        batch.block_tables,
        *batch.side_slots,
        *batch.side_tables,
        batch.seq_lens,
        batch.query_start_loc,
        batch.logits_rows,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        batch.seeds,
        batch.sample_positions,
        batch.banned,
        batch.sampled,
    )
