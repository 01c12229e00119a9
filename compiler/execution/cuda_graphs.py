"""CUDA graph capture and replay: launches on fixed addresses, of whole steps or of pieces."""

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
Replay = Callable[..., Any]  # with the rows that are wanted, of pieces
Stream: Any = torch.cuda.Stream  # torch leaves it without types


@functools.cache
def _capture_stream(device: torch.device) -> Any:
    """One for all captures of a process: torch keeps 32 MiB for GEMMs on each stream for ever."""
    return Stream(device)


@dataclass(slots=True)
class GraphRecord:
    """One line of the ledger: what a capture cost, and what it was used for."""

    key: Any
    bytes: int  # of device memory
    milliseconds: float  # that capturing took
    num_replays: int = 0
    num_tokens: int = 0  # in all replays
    num_padded_tokens: int = 0  # beside these


@dataclass(slots=True)
class _Capture:
    replay: Replay
    addresses: tuple[int, ...]  # of the tensors it reads that others write
    record: GraphRecord
    is_checked: bool = False


@dataclass(slots=True)
class CudaGraphs:
    """Captures by key, in one memory pool: capture the largest first, and smaller ones fit into its memory.

    On a CPU the same bookkeeping runs with the callable run again in place of a replay, on the same static
    tensors, so that mistakes of padding and of stale memory show without a GPU.
    """

    device: torch.device
    _captures: dict[Hashable, _Capture] = field(default_factory=dict)
    _pool: Any = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captures

    def capture(self, key: Hashable, run: Run, reads: Sequence[Tensor]) -> None:
        """Capture a callable; `reads` are the tensors that are rewritten before each replay.

        A tensor that it returns lies in the pool's memory, for others to use again: it is good until the next
        replay, provided that the callable held it until its last operation.
        """
        self._add(key, lambda: self._captured(run), reads)

    def capture_pieces(
        self, key: Hashable, plan: BoundPlan, token_ids: Tensor, positions: Tensor, attend: Attend
    ) -> None:
        """Capture a plan's pieces for one number of tokens; attend is called between them at every replay.

        token_ids and positions [T] int32 are rewritten before each; a replay returns hidden states [T, H], or
        those [R, H] of the tokens [R] int32 that it is asked for, by the last piece without its graph.
        """
        self._add(
            key, lambda: self._captured_pieces(plan, token_ids, positions, attend), (token_ids, positions)
        )

    def replay(
        self,
        key: Hashable,
        reads: Sequence[Tensor],
        *,
        num_tokens: int,
        num_padded: int,
        rows: Tensor | None = None,
    ) -> Any:
        """What the captured callable returned, now computed from what the tensors hold.

        num_tokens and num_padded are for the ledger. rows: see capture_pieces. CompileError where `reads` are
        not those of the capture, which the first replay checks.
        """
        capture = self._captures[key]
        if not capture.is_checked:
            self._check_addresses(capture, reads)
        record = capture.record
        record.num_replays += 1
        record.num_tokens += num_tokens
        record.num_padded_tokens += num_padded
        return capture.replay() if rows is None else capture.replay(rows)

    def ledger(self) -> tuple[GraphRecord, ...]:
        """Every capture with its cost and use, in the order in which they were made."""
        return tuple(capture.record for capture in self._captures.values())

    def close(self) -> None:
        """Drop every capture and its memory."""
        self._captures.clear()
        self._pool = None

    def _add(self, key: Hashable, capture: Callable[[], Replay], reads: Sequence[Tensor]) -> None:
        assert key not in self._captures, f"{key} is captured already"
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # nothing may run in the pool's memory when it is given out
            torch.cuda.empty_cache()  # what that frees is not the capture's gain
        before, started = self._memory_in_use(), time.perf_counter()
        replay = capture()
        self._captures[key] = _Capture(
            replay=replay,
            addresses=tuple(tensor.data_ptr() for tensor in reads),
            record=GraphRecord(
                key=key,
                bytes=self._memory_in_use() - before,
                milliseconds=(time.perf_counter() - started) * 1e3,
            ),
        )

    def _check_addresses(self, capture: _Capture, reads: Sequence[Tensor]) -> None:
        """A replay reads where the capture read; a tensor that moved would be read at its old place."""
        found = tuple(tensor.data_ptr() for tensor in reads)
        if found != capture.addresses:
            raise CompileError(f"tensors that CUDA graph {capture.record.key} reads moved since its capture")
        capture.is_checked = True

    def _memory_in_use(self) -> int:
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def _captured(self, run: Run) -> Run:
        if self.device.type != "cuda":
            return run
        graph, result = self._capture_graph(run)
        return partial(_replay, graph, self._borrowed(result) if isinstance(result, Tensor) else result)

    def _capture_graph(self, run: Run) -> tuple[torch.cuda.CUDAGraph, Any]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()  # torch.cuda.graph would empty the cache for every piece
        with torch.cuda.stream(_capture_stream(self.device)):
            # other threads go on allocating: that is no part of this graph, and none of its business
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        return graph, result

    def _captured_pieces(
        self, plan: BoundPlan, token_ids: Tensor, positions: Tensor, attend: Attend
    ) -> Replay:
        """A list of launches: replay a piece, attend on the tensors it left, and so on."""
        launches: list[Run] = []
        last: list[Any] = []  # what the piece before takes

        def run_piece(call: Callable[[list[Any]], Sequence[Any]], arguments: list[Any]) -> Sequence[Any]:
            last[:] = (self._borrowed(each) if isinstance(each, Tensor) else each for each in arguments)
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
        return partial(_launch, launches, self._borrowed(hidden), partial(plan.call_last, last))

    def _borrowed(self, tensor: Tensor) -> Tensor:
        """The tensor without ownership: what the plan drops after its last use, later pieces may use again.

        Replays run in the order of the capture, so nothing is overwritten that is still to be read.
        """
        return torch_compat.weak_view(tensor) if self.device.type == "cuda" else tensor


def _replay(graph: torch.cuda.CUDAGraph, result: Any) -> Any:
    graph.replay()
    return result


def _launch(
    launches: Sequence[Run], result: Tensor, call_last: Callable[[Tensor], Tensor], rows: Tensor | None = None
) -> Tensor:
    for launch in launches if rows is None else launches[:-1]:
        launch()
    return result if rows is None else call_last(rows)


def _run_into(
    call: Callable[[list[Any]], Sequence[Any]], arguments: tuple[Any, ...], results: tuple[Tensor, ...]
) -> None:
    """Run a piece again with its results where they were: what a replay does on a GPU."""
    for static, new in zip(results, call(list(arguments)), strict=True):
        static.copy_(new)
