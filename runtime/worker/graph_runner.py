"""Captures of steps: which sizes there are, which of them serves a step, and its replay."""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...common.errors import shown
from ...common.logging import get_logger
from ...compiler.execution.cpu_call_graph import CpuCallGraphs
from ...compiler.execution.cuda_graphs import CudaGraphs
from ...compiler.execution.plan import BoundPlan
from ..protocol.scheduler_output import SchedulerOutput, no_requests
from .attention import PagedAttention
from .input_batch import MAX_BANNED, BatchView, InputBatch, fits_captured
from .sampler import rows_read

logger = get_logger("runtime")
# Steps that a size larger than theirs serves until theirs is captured: a capture takes about as long as a few
# decode steps, and padding costs up to a third of one.
STEPS_BEFORE_CAPTURE = 4
Forward = Callable[[Tensor, Tensor, PagedAttention], Tensor]  # token_ids [T], positions [T] -> hidden [T, H]


@dataclass(frozen=True, slots=True)
class Decode:
    """A CUDA graph of a whole step of `size` requests with equally many tokens each, sampling included.

    Tokens but the first of each are drafts; the step judges them, and leaves others for the next one.
    """

    size: int
    query_len: int = 1  # tokens of each
    num_next: int = 0  # drafts that it leaves of each
    adapts: bool = False  # by the plan of steps with adapters
    is_greedy: bool = False  # of greedy samples alone, where ranks that share the vocabulary gather no logits


@dataclass(frozen=True, slots=True)
class Mixed:
    """CUDA graphs of the pieces for `size` tokens of any requests, attention called between them."""

    size: int
    adapts: bool = False


class PlannedCaptures(NamedTuple):
    """Which sizes are captured, and when."""

    decodes: Sequence[Decode] = ()
    mixed_sizes: Sequence[int] = ()  # in tokens; only of a model that was compiled
    first: Container[int] | None = None  # the numbers of both that are captured before others; None: all
    between_steps: bool = False  # whether any is captured as soon as enough steps came without


class Computed(NamedTuple):
    """What a whole step computed, sampling included."""

    hidden: Tensor  # [tokens, H], and further columns where a drafter wants them
    logits: Tensor | None  # [samples, vocab] that it took its samples from, if any


RunStep = Callable[[BatchView, Decode], Computed]
Prepare = Callable[[BatchView], None]
Choose = Callable[[BatchView, Tensor], Tensor]  # hidden [T, H] -> logits [samples, vocab]
MAX_CHOSEN = 32  # samples in a CPU call graph: of more, the logits may be a library's, which it would copy


class GraphRunner:
    """The model's forward by CUDA graphs and CPU call graphs, where a step has a size that was captured.

    Sizes are planned, then captured one by one, and serve steps from then on: some at the start, others while
    nothing else is to be done, or between two steps. Everything that is captured reads and writes the input
    batch.
    """

    def __init__(
        self,
        forward: Forward,
        attention: PagedAttention,
        input_batch: InputBatch,
        *,
        cuda_graphs: CudaGraphs | None,
        cpu_call_graphs: CpuCallGraphs | None,
        adapts: bool = False,
    ) -> None:
        """adapts: whether the forward is that of steps with adapters, whose captures are others."""
        self._forward = forward
        self._attention = attention
        self._input_batch = input_batch
        self._cuda_graphs = cuda_graphs
        self._cpu_call_graphs = cpu_call_graphs
        self._adapts = adapts
        self._decodes: tuple[Decode, ...] = ()  # the smallest first
        self._mixed_sizes: tuple[int, ...] = ()
        self._to_capture: deque[Decode | Mixed] = deque()
        self._planned = PlannedCaptures()  # the smallest first
        self._wanted: Counter[Decode | Mixed] = Counter()  # how often, of sizes that are not captured
        self._dropped: set[Decode | Mixed] = set()  # what was captured when it was dropped
        self._is_dropped = False  # since when nobody asked for a capture

    @property
    def num_cpu_replays(self) -> int:
        """Steps so far that a CPU call graph served."""
        return self._cpu_call_graphs.num_replays if self._cpu_call_graphs else 0

    def plan_captures(self, planned: PlannedCaptures) -> int:
        """Note sizes to be captured, and return how many of them first.

        The largest come before smaller ones, which fit into them.
        """
        own = (dataclasses.replace(key, adapts=self._adapts) for key in planned.decodes)
        mixed = planned.mixed_sizes if isinstance(self._forward, BoundPlan) else ()
        self._planned = planned._replace(
            decodes=tuple(sorted(own, key=_smallest_first)), mixed_sizes=tuple(sorted(mixed))
        )
        self._to_capture = self._in_order()
        return sum(map(self._is_first, self._to_capture))

    def capture_next(
        self, run_step: RunStep, prepare: Prepare = lambda batch: None, *, again: bool = False
    ) -> bool:
        """Capture one size, which serves steps from then on; False where none is left.

        No step may be in flight. prepare: called with a whole step's padding before it runs. again: whether
        only a size will do that was captured when it was dropped.
        """
        self._is_dropped = False
        if not self._to_capture or (again and self._to_capture[0] not in self._dropped):
            return False
        assert self._cuda_graphs is not None, "nothing to capture with"
        key = self._to_capture[0]
        if key not in self._cuda_graphs:  # it is, where an interrupt came right after its capture
            self._capture(self._cuda_graphs, key, run_step, prepare)
        if isinstance(key, Decode):
            self._decodes = tuple(sorted({*self._decodes, key}, key=_smallest_first))
        else:
            self._mixed_sizes = tuple(sorted({*self._mixed_sizes, key.size}))
        self._to_capture.popleft()
        return True

    def capture_if_due(
        self, plan: SchedulerOutput, run_step: RunStep, prepare: Prepare, *, is_greedy: bool = False
    ) -> None:
        """Capture the size of a step that is to be launched, where such steps came often enough without.

        The step before may be in flight: what it leaves on the device for this one stays. A size that cannot
        be captured is given up, with a warning. After drop() none is, until another way captures one.
        """
        planned = self._planned
        if self._is_dropped or not (self._to_capture and planned.between_steps):
            return
        key = self._smallest_for(plan, planned.decodes, planned.mixed_sizes, is_greedy=is_greedy)
        if key is None or key not in self._to_capture:
            return
        self._wanted[key] += 1
        if self._wanted[key] < STEPS_BEFORE_CAPTURE:
            return
        self._to_capture = deque([key, *(each for each in self._to_capture if each != key)])
        try:
            with self._input_batch.samples_kept():
                self.capture_next(run_step, prepare)
        except Exception as error:
            self._to_capture.remove(key)
            logger.warning("%s could not be captured, and is served as before: %s", key, shown(error))

    def drop(self) -> None:
        """Drop every capture and its memory; the sizes are to be captured again, those that were first."""
        self._is_dropped = True
        self._dropped.update(self._decodes, (Mixed(size, self._adapts) for size in self._mixed_sizes))
        self._to_capture = self._in_order()
        self._decodes = self._mixed_sizes = ()  # before the graphs go: an interrupt may come between
        if self._cuda_graphs is not None:
            self._cuda_graphs.close()
        if self._cpu_call_graphs is not None:
            self._cpu_call_graphs.drop()

    def size_for(self, plan: SchedulerOutput, *, is_greedy: bool = False) -> Decode | Mixed | None:
        """The smallest capture that holds a step, of whole steps if it can be; None where there is none.

        is_greedy: one of those may be it, and is of two of the same size.
        """
        return self._smallest_for(plan, self._decodes, self._mixed_sizes, is_greedy=is_greedy)

    def _smallest_for(
        self, plan: SchedulerOutput, decodes: Iterable[Decode], mixed_sizes: Sequence[int], *, is_greedy: bool
    ) -> Decode | Mixed | None:
        """The smallest of these that holds a step; all of them are in order."""
        if decodes and (query_len := plan.query_len) and fits_captured(plan.banned):
            wanted = query_len, 0 if plan.drafts is None else plan.drafts.num_next
            for key in decodes:
                fits = (key.query_len, key.num_next) == wanted and key.size >= plan.num_rows
                if fits and is_greedy >= key.is_greedy:
                    return key
        size = _smallest(mixed_sizes, plan.num_tokens)
        return None if size is None else Mixed(size, self._adapts)

    def num_padded(self, plan: SchedulerOutput) -> int:
        """Tokens of a step with its padding."""
        match self.size_for(plan):
            case Decode() as key:
                return _num_tokens(key)
            case Mixed(size):
                return size
        return plan.num_tokens

    def replay_decode(self, key: Decode, batch: BatchView) -> Computed:
        """What the step computed, good until the next replay."""
        assert self._cuda_graphs is not None
        computed: Computed = self._cuda_graphs.replay(
            key,
            _reads(batch),
            num_tokens=batch.num_tokens,
            num_padded=_num_tokens(key) - batch.num_tokens,
        )
        return computed

    def rows_for(self, plan: SchedulerOutput, batch: BatchView) -> Tensor | None:
        """The tokens [R] int32 whose hidden states are all that a step without drafts needs, if few are."""
        takes_rows = isinstance(self._forward, BoundPlan) and self._forward.can_take_rows
        return rows_read(plan, batch) if takes_rows and not self._adapts else None

    def replay_mixed(self, key: Mixed, batch: BatchView, rows: Tensor | None = None) -> Tensor:
        """Hidden states [size, H] of the step that attention was begun with, or of these rows [R, H].

        Good until the next replay.
        """
        assert self._cuda_graphs is not None
        hidden: Tensor = self._cuda_graphs.replay(
            key,
            (batch.token_ids, batch.positions),
            num_tokens=batch.num_tokens,
            num_padded=key.size - batch.num_tokens,
            rows=rows,
        )
        return hidden

    def forward(self, batch: BatchView, rows: Tensor | None = None) -> Tensor:
        """Hidden states [T, H], or of these rows [R, H], without a CUDA graph, or while one is captured.

        Good until the next step.
        """
        inputs = batch.token_ids, batch.positions
        if rows is not None:
            assert isinstance(self._forward, BoundPlan), "a forward that takes no rows"
            return self._forward(*inputs, self._attention, rows=rows)
        if self._cpu_call_graphs is None or not _is_decode(batch):
            return self._forward(*inputs, self._attention)
        given = *inputs, self._attention, (*inputs, *_attention_reads(batch))
        return self._cpu_call_graphs.forward(*given, query_len=batch.max_query_len)

    def whole_step(self, batch: BatchView, choose: Choose | None) -> Computed | None:
        """A step by a CPU call graph, with its samples if `choose` is all they take; None where it is not.

        Good until the next step.
        """
        graphs, is_plain = self._cpu_call_graphs, batch.is_drawn and batch.logprobs is None
        if graphs is None or choose is None or not (is_plain and _is_decode(batch)):
            return None
        if not 0 < batch.num_samples <= MAX_CHOSEN or batch.banned.shape[1] > MAX_BANNED:
            return None
        inputs = batch.token_ids, batch.positions
        hidden, logits, _ = graphs.whole_step(
            *inputs,
            self._attention,
            (batch.token_ids, *_reads(batch)),
            lambda hidden: (choose(batch, hidden), batch.sampled),
            query_len=batch.max_query_len,
        )
        return Computed(hidden, logits)

    def _in_order(self) -> deque[Decode | Mixed]:
        """What is planned, in the order in which it is captured."""
        mixed = [Mixed(size, self._adapts) for size in reversed(self._planned.mixed_sizes)]
        decodes = sorted(self._planned.decodes, key=_num_tokens, reverse=True)
        largest_first: list[Decode | Mixed] = [*mixed, *decodes]
        return deque(sorted(largest_first, key=self._rank, reverse=True))

    def _rank(self, key: Decode | Mixed) -> tuple[bool, bool]:
        """What comes first is larger."""
        return key in self._dropped, self._is_first(key)

    def _is_first(self, key: Decode | Mixed) -> bool:
        return self._planned.first is None or key.size in self._planned.first

    def _capture(self, graphs: CudaGraphs, key: Decode | Mixed, run_step: RunStep, prepare: Prepare) -> None:
        """Run once, so that modules and workspaces are loaded, then capture."""
        if isinstance(key, Decode):
            num_tokens = _num_tokens(key)
            padding = self._input_batch.write(no_requests(), num_tokens, key.size, num_tokens)
            batch = dataclasses.replace(padding, max_query_len=key.query_len)
            prepare(batch)
            run_step(batch, key)
            graphs.capture(key, lambda: run_step(batch, key), _reads(batch))
            return
        padding = self._input_batch.write(no_requests(), key.size, 1)
        batch = dataclasses.replace(padding, max_query_len=key.size)
        self._attention.begin(batch)
        plan = self._forward
        assert isinstance(plan, BoundPlan)
        inputs = batch.token_ids, batch.positions, self._attention
        plan(*inputs)
        graphs.capture_pieces(key, plan, *inputs)


def _is_decode(batch: BatchView) -> bool:
    """Whether all sequences have equally many tokens, and each token a sample."""
    return batch.num_samples == batch.num_tokens == batch.num_seqs * batch.max_query_len


def _num_tokens(key: Decode) -> int:
    return key.size * key.query_len


def _smallest_first(key: Decode) -> tuple[int, bool]:
    """The order in which captures are tried: of equal sizes the one that serves fewer steps."""
    return _num_tokens(key), not key.is_greedy


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
