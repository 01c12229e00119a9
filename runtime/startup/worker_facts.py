"""What a worker says of itself when it is asked: figures and words, plain data."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...common.errors import RequestError
from ...compiler.execution.cuda_graphs import GraphRecord
from ...compiler.execution.plan import Compiled
from ...compiler.inspect.explain import explain_text
from ...compiler.inspect.explain_page import explain_page
from ...models.quantization.kept import listed
from ..worker.profiler import WorkerProfiler
from .identity import weight_identity
from .loaded import LoadedWorker
from .weight_updates import update_weights


def facts_of(worker: LoadedWorker, note_use: Callable[[], None]) -> Mapping[str, Callable[..., Any]]:
    """What Executor.collective_rpc asks of a worker, beside the public methods of its runner."""
    resolved = worker.resolved
    rank = resolved.stage_index * resolved.config.tensor_parallel + resolved.rank
    profiler = WorkerProfiler(rank, resolved.device.type)
    return {
        "worker_stats": partial(worker_stats, worker),
        "note_use": note_use,
        "explain": partial(explanation_of, worker),
        "explain_html": partial(page_of, worker),
        "weight_identity": partial(weight_identity, worker),
        "update_weights": partial(update_weights, worker),
        "start_profile": profiler.start,
        "stop_profile": profiler.stop,
    }


def worker_stats(worker: LoadedWorker) -> dict[str, Any]:
    """Counts of pieces, captures and bytes: the part of Runtime.stats() that a worker knows."""
    host = worker.runner.host_blocks
    return {
        "compile": _compile_stats(_plans(worker), len(worker.late_builds.events)),
        "cuda_graphs": _graph_stats(worker),
        "cpu_call_graphs": {"replays": worker.runner.num_cpu_replays},
        "quantization": worker.weights.stats(),
        "host_blocks": None if host is None else {"slot_bytes": host.slot_bytes, "num_bytes": host.num_bytes},
    }


def explanation_of(worker: LoadedWorker) -> str:
    """What was compiled, quantized, chosen and built late, in words."""
    compiled, kernels = worker.compiled, worker.gemm_kernels
    text = "the model runs eagerly: nothing was compiled" if compiled is None else explain_text(compiled)
    served = ["\nkernels of GEMMs:", *(f"  {line}" for line in kernels)] if kernels else []
    quantized = [f"\n{sentence}" for sentence in worker.weights.sentences()]
    quantized += listed(worker.weights.kept())
    if worker.drafter is not None and worker.drafter.compiled is not None:
        text += f"\n\nthe drafter\n\n{explain_text(worker.drafter.compiled)}"
    late = [f"built in the middle of a request: {what}" for what in worker.late_builds.events]
    return "\n".join([text, *quantized, *served, *late])


def page_of(worker: LoadedWorker) -> str:
    """The page of what was compiled and captured; RequestError where nothing was."""
    compiled, resolved = worker.compiled, worker.resolved
    if compiled is None:
        raise RequestError("the model runs eagerly: nothing was compiled, so there is nothing to show")
    title, numerics = Path(resolved.config.model).name, resolved.config.numerics
    return explain_page(compiled, resolved.store, title=title, numerics=numerics, graphs=_ledger(worker))


def _plans(worker: LoadedWorker) -> list[Compiled]:
    """The plans of the model and of what drafts for it, of those that are compiled."""
    drafted = None if worker.drafter is None else worker.drafter.compiled
    return [
        compiled for compiled in (worker.compiled, worker.compiled_adapted, drafted) if compiled is not None
    ]


def _compile_stats(plans: Sequence[Compiled], num_late: int) -> dict[str, Any]:
    """Counts of pieces, and their seconds; `recompiles` are kernels that were built after the start."""
    return {
        "pieces": sum(compiled.num_pieces for compiled in plans),
        "unique_pieces": sum(len(compiled.plan.pieces) for compiled in plans),
        "compiled": sum(compiled.num_compiled for compiled in plans),
        "loaded": sum(compiled.num_loaded for compiled in plans),
        "recompiles": num_late,
        "seconds": sum((second for compiled in plans for second in compiled.seconds.values()), 0.0),
    }


def _ledger(worker: LoadedWorker) -> tuple[GraphRecord, ...]:
    return worker.cuda_graphs.ledger() if worker.cuda_graphs else ()


def _graph_stats(worker: LoadedWorker) -> dict[str, Any]:
    ledger = _ledger(worker)
    return {
        "sizes": [[type(record.key).__name__.lower(), record.key.size] for record in ledger],
        "replays": sum(record.num_replays for record in ledger),
        "eager_steps": worker.runner.num_eager_steps,
        "tokens": sum(record.num_tokens for record in ledger),
        "padded_tokens": sum(record.num_padded_tokens for record in ledger),
        "bytes": sum(record.bytes for record in ledger),
        "milliseconds": sum(record.milliseconds for record in ledger),
    }
