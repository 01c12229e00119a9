"""The figures of a running engine, under names that stay."""

from typing import Any

from .startup.description import settings_in_force
from .startup.loaded import LoadedRuntime


def collect_stats(loaded: LoadedRuntime) -> dict[str, Any]:
    """Counts of blocks, requests and pieces, seconds of the start, and the settings in force: plain data.

    What workers count is the first one's.
    """
    core, pool = loaded.core.stats(), loaded.kv_cache.pool
    worker = loaded.executor.collective_rpc("worker_stats")[0]
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
        "swap": _swap_stats(loaded, worker["host_blocks"]),
        "prefix_cache": core["prefix_cache"],
        "latency": core["latency"],
        "compile": worker["compile"],
        "cuda_graphs": worker["cuda_graphs"],
        "cpu_call_graphs": worker["cpu_call_graphs"],
        "startup": {
            **loaded.watch.seconds,
            "first_token": core["first_token"],
            "overlapped": dict(loaded.watch.overlapped),  # while the stages ran; not part of their sum
        },
        "resolved": settings_in_force(loaded),
        "quantization": worker["quantization"],
    }


def explanation_of(loaded: LoadedRuntime) -> str:
    """What was compiled, quantized, chosen and built late, in words."""
    text: str = loaded.executor.collective_rpc("explain")[0]
    return text


def page_of(loaded: LoadedRuntime) -> str:
    """The page of what was compiled and captured; RequestError where nothing was."""
    page: str = loaded.executor.collective_rpc("explain_html")[0]
    return page


def _swap_stats(loaded: LoadedRuntime, host: dict[str, int] | None) -> dict[str, int]:
    """Blocks of host memory, how many of them are used, and what has been copied there and back."""
    swap = loaded.kv_cache.swap
    if swap is None or host is None:
        return dict.fromkeys(("total", "used", "out", "in", "out_bytes", "in_bytes", "host_bytes"), 0)
    return {
        "total": swap.num_slots,
        "used": swap.num_used,
        "out": swap.num_out,
        "in": swap.num_in,
        "out_bytes": swap.num_out * host["slot_bytes"],
        "in_bytes": swap.num_in * host["slot_bytes"],
        "host_bytes": host["num_bytes"],
    }
