"""The figures of a running engine, under names that stay."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.errors import RequestError
from ..compiler.execution.cuda_graphs import GraphRecord
from ..compiler.execution.plan import Compiled
from ..compiler.inspect.explain import explain_text
from ..compiler.inspect.explain_page import explain_page
from ..models.quantization.kept import listed
from .startup.description import settings_in_force
from .startup.loaded import LoadedRuntime


def collect_stats(loaded: LoadedRuntime) -> dict[str, Any]:
    """Counts of blocks, requests and pieces, seconds of the start, and the settings in force: plain data."""
    core, pool = loaded.core.stats(), loaded.kv_cache.pool
    return {
        "blocks": {
            "total": pool.num_usable,
            "free": pool.num_free,
            "cached": pool.num_cached,
            "used": pool.num_used,
        },
        "requests": core["requests"],
        "preemptions": core["preemptions"],
        "forced_tokens": core["forced_tokens"],
        "speculation": core["speculation"],
        "swap": _swap_stats(loaded),
        "prefix_cache": core["prefix_cache"],
        "latency": core["latency"],
        "compile": _compile_stats(_plans(loaded), len(loaded.late_builds.events)),
        "cuda_graphs": _graph_stats(loaded),
        "cpu_call_graphs": {"replays": loaded.runner.num_cpu_replays},
        "startup": {
            **loaded.watch.seconds,
            "first_token": core["first_token"],
            "overlapped": dict(loaded.watch.overlapped),  # while the stages ran; not part of their sum
        },
        "resolved": settings_in_force(loaded),
        "quantization": loaded.weights.stats(),
    }


def explanation_of(loaded: LoadedRuntime) -> str:
    """What was compiled, quantized, chosen and built late, in words."""
    compiled, kernels = loaded.compiled, loaded.gemm_kernels
    text = "the model runs eagerly: nothing was compiled" if compiled is None else explain_text(compiled)
    served = ["\nkernels of GEMMs:", *(f"  {line}" for line in kernels)] if kernels else []
    quantized = [f"\n{sentence}" for sentence in loaded.weights.sentences()]
    quantized += listed(loaded.weights.kept())
    if loaded.drafter is not None and loaded.drafter.compiled is not None:
        text += f"\n\nthe drafter\n\n{explain_text(loaded.drafter.compiled)}"
    late = [f"built in the middle of a request: {what}" for what in loaded.late_builds.events]
    return "\n".join([text, *quantized, *served, *late])


def page_of(loaded: LoadedRuntime) -> str:
    """The page of what was compiled and captured; RequestError where nothing was."""
    compiled, resolved = loaded.compiled, loaded.resolved
    if compiled is None:
        raise RequestError("the model runs eagerly: nothing was compiled, so there is nothing to show")
    title, numerics = Path(resolved.config.model).name, resolved.config.numerics
    return explain_page(compiled, resolved.store, title=title, numerics=numerics, graphs=_ledger(loaded))


def _plans(loaded: LoadedRuntime) -> list[Compiled]:
    """The plans of the model and of what drafts for it, of those that are compiled."""
    drafted = None if loaded.drafter is None else loaded.drafter.compiled
    return [compiled for compiled in (loaded.compiled, drafted) if compiled is not None]


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


def _ledger(loaded: LoadedRuntime) -> tuple[GraphRecord, ...]:
    return loaded.cuda_graphs.ledger() if loaded.cuda_graphs else ()


def _graph_stats(loaded: LoadedRuntime) -> dict[str, Any]:
    ledger = _ledger(loaded)
    return {
        "sizes": [[type(record.key).__name__.lower(), record.key.size] for record in ledger],
        "replays": sum(record.num_replays for record in ledger),
        "eager_steps": loaded.runner.num_eager_steps,
        "tokens": sum(record.num_tokens for record in ledger),
        "padded_tokens": sum(record.num_padded_tokens for record in ledger),
        "bytes": sum(record.bytes for record in ledger),
        "milliseconds": sum(record.milliseconds for record in ledger),
    }


def _swap_stats(loaded: LoadedRuntime) -> dict[str, int]:
    """Blocks of host memory, how many of them are used, and what has been copied there and back."""
    swap, host = loaded.kv_cache.swap, loaded.runner.host_blocks
    if swap is None or host is None:
        return dict.fromkeys(("total", "used", "out", "in", "out_bytes", "in_bytes", "host_bytes"), 0)
    return {
        "total": swap.num_slots,
        "used": swap.num_used,
        "out": swap.num_out,
        "in": swap.num_in,
        "out_bytes": swap.num_out * host.slot_bytes,
        "in_bytes": swap.num_in * host.slot_bytes,
        "host_bytes": host.num_bytes,
    }
