"""CPU call graphs: the kernel calls of a decode step, captured once, replayed without Python."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.errors import CompileError
from ...common.logging import get_logger
from ...custom_ops._shared.call_capture import captured_by
from ...custom_ops._shared.library import OF_RANKS, direct_call
from ...custom_ops._shared.packed_calls import joined
from ..capture.capture import Attend
from ..torch_internals import torch_compat
from .plan import BoundPlan

logger = get_logger("compiler")

Key = tuple[int, int, bool, int]  # tokens, tokens of each sequence, whether it is a whole step, threads
Results = tuple[Tensor, ...]
Finish = Callable[[Tensor], Results]  # of hidden states
MAX_TOKENS = 64  # of a captured step; beyond, what surrounds the kernels no longer shows
UNLIKELY = -7  # in place of an id, before a graph has to write it
PAGE = 4096  # bytes; memory of captures comes in multiples
CPU = torch.device("cpu")
EMPTY = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


class NotCapturable(Exception):
    """A step reads on the host what was computed, so that its calls would not be the same again."""


class CpuCallGraphs:
    """forward of a plan by the captured calls of its kernels, for steps of equally many tokens a sequence.

    The second step of a size is captured. Its graph is replayed once it has reproduced, bit for bit, a step
    that it was not made from. All graphs share their memory: what one returns is good until the next.
    """

    def __init__(self, plan: BoundPlan) -> None:
        self._plan = plan
        self._memory = _Memory()
        self._seen: set[Key] = set()
        self._graphs: dict[Key, _CallGraph | None] = {}  # None: not to be had
        self.num_replays = 0  # so far

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        reads: Sequence[Tensor],
        *,
        query_len: int = 1,
    ) -> Tensor:
        """Hidden states [T, H] of T tokens; `reads` are the tensors that are rewritten before each step.

        token_ids and positions [T] int32; query_len: tokens of each sequence. CompileError where one of
        `reads` moved since the capture. A graph that computes something else than the step itself is dropped,
        with a warning.
        """
        key = token_ids.shape[0], query_len, False, torch.get_num_threads()
        (hidden,) = self._results(key, lambda: (self._plan(token_ids, positions, attend),), reads)
        return hidden

    def whole_step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        reads: Sequence[Tensor],
        finish: Finish,
        *,
        query_len: int = 1,
    ) -> Results:
        """The same, and what `finish` makes of the hidden states, by a graph of both if there can be one."""
        key = token_ids.shape[0], query_len, True, torch.get_num_threads()
        if self._is_out_of_reach(key):
            hidden = self.forward(token_ids, positions, attend, reads, query_len=query_len)
            return hidden, *finish(hidden)

        def run() -> Results:
            hidden = self._plan(token_ids, positions, attend)
            return hidden, *finish(hidden)

        return self._results(key, run, reads)

    def _is_out_of_reach(self, key: Key) -> bool:
        """Whether such steps are known to have no graph."""
        return key in self._graphs and self._graphs[key] is None

    def _results(self, key: Key, run: Callable[[], Results], reads: Sequence[Tensor]) -> Results:
        graph = self._graphs.get(key)
        if graph is None:
            if self._is_out_of_reach(key) or key not in self._seen or key[0] > MAX_TOKENS:
                self._seen.add(key)
                return run()
            return self._capture(key, run, reads)
        graph.check_addresses(reads)
        if not graph.is_trusted:
            return self._verify(key, graph, run)
        if not graph.replay():
            return run()  # a kernel refused its arguments: its op says which and why
        self.num_replays += 1
        return graph.results

    def drop(self) -> None:
        """Drop every graph and its memory."""
        self._graphs.clear()
        self._seen.clear()
        self._memory = _Memory()

    def _verify(self, key: Key, graph: "_CallGraph", run: Callable[[], Results]) -> Results:
        """What the step itself computes, which says whether its graph is to be trusted."""
        expected, is_same = graph.verify(run)
        if not is_same:
            warning = "the CPU call graph of %d tokens computes something else; such steps run without one"
            logger.warning(warning, key[0])
            self._graphs[key] = None
            self._memory.let_go(graph.results)
        return expected

    def _capture(self, key: Key, run: Callable[[], Results], reads: Sequence[Tensor]) -> Results:
        capture = _Capture(self._memory)
        try:
            with capture, captured_by(capture):
                results = run()
        except NotCapturable as why:
            logger.info("steps of %d tokens have no CPU call graph: %s", key[0], why)
            self._graphs[key] = None
            return run()
        self._memory.keep(results)
        self._graphs[key] = _CallGraph(capture.calls, results, reads)
        return results


class _CallGraph:
    """Calls with what they returned when they were captured, and where the results lie."""

    def __init__(
        self, calls: list[tuple[Callable[[], Any], Any]], results: Results, reads: Sequence[Tensor]
    ) -> None:
        self._calls = joined(calls)
        self._addresses = [tensor.data_ptr() for tensor in reads]
        self.results = results
        self.is_trusted = False

    def replay(self) -> bool:
        """Make the calls again; False where one returned something else."""
        return all(call() == returned for call, returned in self._calls)

    def check_addresses(self, reads: Sequence[Tensor]) -> None:
        """The calls read where the capture read; a tensor that moved would be read at its old place."""
        if [tensor.data_ptr() for tensor in reads] != self._addresses:
            raise CompileError("tensors that a CPU call graph reads moved since its capture")

    def verify(self, run: Callable[[], Results]) -> tuple[Results, bool]:
        """What the step itself computes, run after the replay, and whether that gave the same bits.

        Before it, the step would have done to the cache what the graph might leave out, and what lies where
        the results will be could be those of a step before. Where a kernel refused its arguments nothing is
        known, and the next step is asked again.
        """
        for result in self.results:
            result.fill_(torch.nan if result.is_floating_point() else UNLIKELY)
        is_done, found = self.replay(), [result.clone() for result in self.results]
        expected = run()
        pairs = zip(found, expected, strict=True)
        is_same = not is_done or all(torch.equal(_bits(one), _bits(other)) for one, other in pairs)
        self.is_trusted = is_done and is_same
        return expected, is_same


class _Capture(torch_compat.DispatchMode):
    """Takes down kernels, which tell it, and what torch itself computes, which comes by here."""

    def __init__(self, memory: "_Memory") -> None:
        super().__init__()
        self.calls: list[tuple[Callable[[], Any], Any]] = []
        self._memory = memory

    def add_call(self, call: Callable[[], Any], result: Any) -> None:
        """A kernel was called and returned this."""
        self.calls.append((call, result))

    def allocate(self, new: Tensor) -> Tensor:
        """The same shape, strides and dtype in memory of the graphs."""
        return self._memory.allocate(new)

    def refuse(self, why: str) -> None:
        """Code that does not add its calls comes next."""
        raise NotCapturable(why)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allocations get memory that stays, views are nothing to do again, the rest is captured.

        Of our own ops it is what they call in turn.
        """
        kwargs = kwargs or {}
        if func.namespace == "lamina" and func._opname not in OF_RANKS:
            with self:
                return direct_call(func._opname, CPU)(*args, **kwargs)
        if set(func.tags) & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}:
            raise NotCapturable(f"{func} depends on what was computed")
        with captured_by(None):
            result = func(*args, **kwargs)
        if func.overloadpacket in EMPTY:
            return self.allocate(result)
        if func._schema.is_mutable:
            self.add_call(partial(_again, func, args, kwargs), None)
            return result
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(one, Tensor) for one in results):
            raise NotCapturable(f"{func} gives something to the host")
        if not {_memory_of(one) for one in results} <= {_memory_of(x) for x in _tensors(args, kwargs)}:
            self.add_call(partial(_again_into, func, args, kwargs, results), None)
        return result


class _Memory:
    """Blocks that one step after another computes in; one is free when nothing but results lies in it."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._num_results: Counter[int] = Counter()  # of graphs, by the addresses of their blocks

    def allocate(self, new: Tensor) -> Tensor:
        num_bytes = -(-new.untyped_storage().nbytes() // PAGE) * PAGE
        fits = (block for block in self._blocks if num_bytes <= block.nbytes <= 2 * num_bytes)
        block = next((block for block in fits if self._is_free(block)), None)
        if block is None:
            block = torch.empty(num_bytes, dtype=torch.uint8)
            self._blocks.append(block)
        return block.view(new.dtype).as_strided(new.shape, new.stride())

    def keep(self, results: Results) -> None:
        """Take a graph's own hold on its results for none: they are read before the next is replayed."""
        self._num_results.update(_memory_of(result) for result in results)

    def let_go(self, results: Results) -> None:
        """Undo keep(), for a graph that is dropped."""
        self._num_results.subtract(_memory_of(result) for result in results)

    def _is_free(self, block: Tensor) -> bool:
        return torch_compat.num_users(block) == 1 + self._num_results[block.data_ptr()]


def _again(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    func(*args, **kwargs)


def _again_into(func: Callable[..., Any], args: Any, kwargs: Any, results: Sequence[Tensor]) -> None:
    """Compute again with the results where they were, for those who read them there."""
    again = func(*args, **kwargs)
    for static, new in zip(results, again if isinstance(again, (tuple, list)) else (again,), strict=True):
        static.copy_(new)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    values = [*args, *kwargs.values()]
    nested = [one for value in values for one in (value if isinstance(value, (tuple, list)) else (value,))]
    return [one for one in nested if isinstance(one, Tensor)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
