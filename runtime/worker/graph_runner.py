"""Captures of steps: which sizes there are, which of them serves a step, and its replay."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...compiler.execution.cpu_call_graph import CpuCallGraphs
from ...compiler.execution.cuda_graphs import CudaGraphs
from ...compiler.execution.plan import BoundPlan
from ..protocol.scheduler_output import SchedulerOutput, no_requests
from .attention import PagedAttention
from .input_batch import BatchView, InputBatch, fits_captured

Forward = Callable[[Tensor, Tensor, PagedAttention], Tensor]  # token_ids [T], positions [T] -> hidden [T, H]
RunStep = Callable[[BatchView], Tensor | None]  # a whole step, sampling included -> its logits


@dataclass(frozen=True, slots=True)
class Decode:
    """A CUDA graph of a whole step of `size` requests with one token each, sampling included."""

    size: int


@dataclass(frozen=True, slots=True)
class Mixed:
    """CUDA graphs of the pieces for `size` tokens of any requests, attention called between them."""

    size: int


class GraphRunner:
    """The model's forward by CUDA graphs and CPU call graphs, where a step has a size that was captured.

    Sizes are planned, then captured one by one, and serve steps from then on. Everything that is captured
    reads and writes the input batch.
    """

    def __init__(
        self,
        forward: Forward,
        attention: PagedAttention,
        input_batch: InputBatch,
        *,
        cuda_graphs: CudaGraphs | None,
        cpu_call_graphs: CpuCallGraphs | None,
    ) -> None:
        self._forward = forward
        self._attention = attention
        self._input_batch = input_batch
        self._cuda_graphs = cuda_graphs
        self._cpu_call_graphs = cpu_call_graphs
        self._decode_sizes: tuple[int, ...] = ()
        self._mixed_sizes: tuple[int, ...] = ()
        self._to_capture: deque[Decode | Mixed] = deque()

    @property
    def num_cpu_replays(self) -> int:
        """Steps so far that a CPU call graph served."""
        return self._cpu_call_graphs.num_replays if self._cpu_call_graphs else 0

    def plan_captures(self, decode_sizes: Sequence[int], mixed_sizes: Sequence[int]) -> int:
        """Note sizes to be captured, and return how many are; the largest first: smaller ones fit into it.

        decode_sizes in requests, mixed_sizes in tokens; the latter only of a model that was compiled.
        """
        mixed = mixed_sizes if isinstance(self._forward, BoundPlan) else ()
        self._to_capture = _largest_first(decode_sizes, mixed)
        return len(self._to_capture)

    def capture_next(self, run_step: RunStep) -> bool:
        """Capture one size, which serves steps from then on; False where none is left.

        No step may be in flight.
        """
        if not self._to_capture:
            return False
        assert self._cuda_graphs is not None, "nothing to capture with"
        key = self._to_capture[0]
        if key not in self._cuda_graphs:  # it is, where an interrupt came right after its capture
            self._capture(self._cuda_graphs, key, run_step)
        if isinstance(key, Decode):
            self._decode_sizes = tuple(sorted({*self._decode_sizes, key.size}))
        else:
            self._mixed_sizes = tuple(sorted({*self._mixed_sizes, key.size}))
        self._to_capture.popleft()
        return True

    def drop(self) -> None:
        """Drop every capture and its memory; the sizes are to be captured again."""
        mixed = {*self._mixed_sizes, *(key.size for key in self._to_capture if isinstance(key, Mixed))}
        decode = {*self._decode_sizes, *(key.size for key in self._to_capture if isinstance(key, Decode))}
        self._to_capture = _largest_first(decode, mixed)
        self._decode_sizes = self._mixed_sizes = ()  # before the graphs go: an interrupt may come between
        if self._cuda_graphs is not None:
            self._cuda_graphs.close()
        if self._cpu_call_graphs is not None:
            self._cpu_call_graphs.drop()

    def size_for(self, plan: SchedulerOutput) -> Decode | Mixed | None:
        """The smallest capture that holds a step, of whole steps if it can be; None where there is none."""
        if plan.is_decode and fits_captured(plan.banned):
            size = _smallest(self._decode_sizes, plan.num_tokens)
            if size is not None:
                return Decode(size)
        size = _smallest(self._mixed_sizes, plan.num_tokens)
        return None if size is None else Mixed(size)

    def replay_decode(self, key: Decode, batch: BatchView) -> Tensor | None:
        """The logits [size, vocab] that the step took its samples from, good until the next replay."""
        assert self._cuda_graphs is not None
        logits: Tensor | None = self._cuda_graphs.replay(
            key,
            _reads(batch),
            num_tokens=batch.num_tokens,
            num_padded=key.size - batch.num_tokens,
        )
        return logits

    def replay_mixed(self, key: Mixed, batch: BatchView) -> Tensor:
        """Hidden states [size, H] of the step that attention was begun with, good until the next replay."""
        assert self._cuda_graphs is not None
        hidden: Tensor = self._cuda_graphs.replay(
            key,
            (batch.token_ids, batch.positions),
            num_tokens=batch.num_tokens,
            num_padded=key.size - batch.num_tokens,
        )
        return hidden

    def forward(self, batch: BatchView) -> Tensor:
        """Hidden states [T, H] without a CUDA graph, or while one is captured; good until the next step."""
        inputs = batch.token_ids, batch.positions
        if self._cpu_call_graphs is None or not batch.max_query_len == 1 == batch.num_tokens / batch.num_seqs:
            return self._forward(*inputs, self._attention)
        return self._cpu_call_graphs.forward(*inputs, self._attention, (*inputs, *_attention_reads(batch)))

    def _capture(self, graphs: CudaGraphs, key: Decode | Mixed, run_step: RunStep) -> None:
        """Run once, so that modules and workspaces are loaded, then capture."""
        if isinstance(key, Decode):
            padding = self._input_batch.write(no_requests(), key.size, key.size, key.size)
            batch = dataclasses.replace(padding, max_query_len=1)
            run_step(batch)
            graphs.capture(key, lambda: run_step(batch), _reads(batch))
            return
        padding = self._input_batch.write(no_requests(), key.size, 1)
        batch = dataclasses.replace(padding, max_query_len=key.size)
        self._attention.begin(batch)
        plan = self._forward
        assert isinstance(plan, BoundPlan)
        inputs = batch.token_ids, batch.positions, self._attention
        plan(*inputs)
        graphs.capture_pieces(key, plan, *inputs)


def _largest_first(decode_sizes: Iterable[int], mixed_sizes: Iterable[int]) -> deque[Decode | Mixed]:
    """The order in which sizes are captured."""
    mixed = [Mixed(size) for size in sorted(mixed_sizes, reverse=True)]
    return deque([*mixed, *(Decode(size) for size in sorted(decode_sizes, reverse=True))])


def _smallest(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest captured size that holds so many, None where there is none."""
    return next((size for size in sizes if size >= wanted), None)


def _attention_reads(batch: BatchView) -> tuple[Tensor, ...]:
    """What attention reads of the input batch."""
    return (
        *batch.slot_mappings,
        *batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
    )


def _reads(batch: BatchView) -> tuple[Tensor, ...]:
    """What a captured decode step reads of the input batch, and where it leaves its samples."""
    return (
        batch.token_sources,
        batch.positions,
        *_attention_reads(batch),
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
