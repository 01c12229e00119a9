"""Launches recorded once on fixed addresses and replayed: whole steps, or the pieces around attention."""

import functools
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.errors import CompileError
from ..capture.capture import Attend
from ..torch_internals import torch_compat
from .plan import BoundPlan

Run = Callable[[], Any]
Stream: Any = torch.cuda.Stream  # torch leaves it without types


@functools.cache
def _recording_stream(device: torch.device) -> Any:
    """One for all recordings of a process: torch keeps 32 MiB for products on each stream for ever."""
    return Stream(device)


@dataclass(slots=True)
class GraphRecord:
    """One line of the ledger: what a recording cost, and what it was used for."""

    key: Any
    bytes: int
    milliseconds: float
    num_replays: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0


@dataclass(slots=True)
class _Recording:
    replay: Run
    addresses: tuple[int, ...]  # of the tensors it reads that others write
    record: GraphRecord
    is_checked: bool = False


@dataclass(slots=True)
class CudaGraphs:
    """Recordings by key, in one memory pool: record the largest first, and smaller ones fit into its memory.

    On a CPU the same bookkeeping runs with the callable run again in place of a replay, on the same static
    tensors, so that mistakes of padding and of stale memory show without a GPU.
    """

    device: torch.device
    _recordings: dict[Hashable, _Recording] = field(default_factory=dict)
    _pool: Any = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recordings

    def record(self, key: Hashable, run: Run, reads: Sequence[Tensor]) -> None:
        """Record a callable; `reads` are the tensors that are rewritten before each replay.

        A tensor that it returns lies in the pool's memory, for others to use again: it is good until the next
        replay, provided that the callable held it until its last operation.
        """
        self._record(key, lambda: self._capture(run), reads)

    def record_pieces(
        self, key: Hashable, plan: BoundPlan, token_ids: Tensor, positions: Tensor, attend: Attend
    ) -> None:
        """Record a plan's pieces for one number of tokens; attend is called between them at every replay."""
        self._record(
            key, lambda: self._capture_pieces(plan, token_ids, positions, attend), (token_ids, positions)
        )

    def replay(self, key: Hashable, reads: Sequence[Tensor], *, num_tokens: int, num_padded: int) -> Any:
        """What the recorded callable returned, now computed from what the tensors hold."""
        recording = self._recordings[key]
        if not recording.is_checked:
            self._check_addresses(recording, reads)
        record = recording.record
        record.num_replays += 1
        record.num_tokens += num_tokens
        record.num_padded_tokens += num_padded
        return recording.replay()

    def ledger(self) -> tuple[GraphRecord, ...]:
        """Every recording with its cost and use, in the order of recording."""
        return tuple(recording.record for recording in self._recordings.values())

    def close(self) -> None:
        """Drop every recording and its memory."""
        self._recordings.clear()
        self._pool = None

    def _record(self, key: Hashable, capture: Callable[[], Run], reads: Sequence[Tensor]) -> None:
        assert key not in self._recordings, f"{key} is recorded already"
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # nothing may run in the pool's memory when it is given out
            torch.cuda.empty_cache()  # what that frees is not the recording's gain
        before, started = self._memory_in_use(), time.perf_counter()
        replay = capture()
        self._recordings[key] = _Recording(
            replay=replay,
            addresses=tuple(tensor.data_ptr() for tensor in reads),
            record=GraphRecord(
                key=key,
                bytes=self._memory_in_use() - before,
                milliseconds=(time.perf_counter() - started) * 1e3,
            ),
        )

    def _check_addresses(self, recording: _Recording, reads: Sequence[Tensor]) -> None:
        """A replay reads where the recording read; a tensor that moved would be read at its old place."""
        found = tuple(tensor.data_ptr() for tensor in reads)
        if found != recording.addresses:
            raise CompileError(f"tensors of recording {recording.record.key} moved since it was made")
        recording.is_checked = True

    def _memory_in_use(self) -> int:
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def _capture(self, run: Run) -> Run:
        if self.device.type != "cuda":
            return run
        graph, result = self._capture_graph(run)
        return partial(_replay, graph, self._borrowed(result) if isinstance(result, Tensor) else result)

    def _capture_graph(self, run: Run) -> tuple[torch.cuda.CUDAGraph, Any]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()  # torch.cuda.graph would empty the cache for every piece
        with torch.cuda.stream(_recording_stream(self.device)):
            # other threads go on allocating: that is no part of this graph, and none of its business
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        return graph, result

    def _capture_pieces(self, plan: BoundPlan, token_ids: Tensor, positions: Tensor, attend: Attend) -> Run:
        """A list of launches: replay a piece, attend on the tensors it left, and so on."""
        launches: list[Run] = []

        def run_piece(call: Callable[[list[Any]], Sequence[Any]], arguments: list[Any]) -> Sequence[Any]:
            if self.device.type != "cuda":
                results = tuple(call(arguments.copy()))
                launches.append(partial(_run_into, call, tuple(arguments), results))
                return results
            graph, results = self._capture_graph(lambda: tuple(call(arguments)))
            launches.append(graph.replay)
            return results  # type: ignore[no-any-return]

        def attend_later(layer: int, *tensors: Tensor) -> None:
            launches.append(partial(attend, layer, *(self._borrowed(tensor) for tensor in tensors)))

        hidden = plan(token_ids, positions, attend_later, run_piece)
        return partial(_launch, launches, self._borrowed(hidden))

    def _borrowed(self, tensor: Tensor) -> Tensor:
        """The tensor without ownership: what the plan drops after its last use, later pieces may use again.

        Replays run in the order of the recording, so nothing is overwritten that is still to be read.
        """
        return torch_compat.weak_view(tensor) if self.device.type == "cuda" else tensor


def _replay(graph: torch.cuda.CUDAGraph, result: Any) -> Any:
    graph.replay()
    return result


def _launch(launches: Sequence[Run], result: Any) -> Any:
    for launch in launches:
        launch()
    return result


def _run_into(
    call: Callable[[list[Any]], Sequence[Any]], arguments: tuple[Any, ...], results: tuple[Tensor, ...]
) -> None:
    """Run a piece again with its results where they were: what a replay does on a GPU."""
    for static, new in zip(results, call(list(arguments)), strict=True):
        static.copy_(new)
