"""Every figure that /metrics tells: its name, kind, meaning and labels, and where it is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from .histogram import Histogram
from .metrics import Metrics

PREFIX = "lamina:"
Labelled = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One figure; read takes what tells of it and returns its value, by labels if it has any."""

    name: str  # without the prefix lamina: and, of a counter, without _total
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()  # beside model_name
    read: Callable[[Any], float | Labelled | Histogram]


def _gauge(name: str, meaning: str, read: Callable[[Any], float | Labelled], *labels: str) -> Family:
    return Family(name=name, kind="gauge", help=meaning, labels=labels, read=read)


def _counter(name: str, meaning: str, read: Callable[[Any], float | Labelled], *labels: str) -> Family:
    return Family(name=name, kind="counter", help=meaning, labels=labels, read=read)


def _histogram(name: str, meaning: str, read: Callable[[Metrics], Histogram]) -> Family:
    return Family(name=name, kind="histogram", help=meaning, read=read)


def _of_each_engine(*families: Family) -> tuple[Family, ...]:
    """Returns families as read from the sources of all engines, by their numbers."""
    return tuple(map(_by_engine, families))


def _by_engine(family: Family) -> Family:
    def read(sources: Mapping[int, Any]) -> Labelled:
        found: dict[tuple[str, ...], float] = {}
        for engine, source in sources.items():
            value: Any = family.read(source)
            values = value.items() if family.labels else [((), value)]
            found |= {(str(engine), *own): float(count) for own, count in values}
        return found

    return replace(family, labels=("engine", *family.labels), read=read)


def _by(counts: Mapping[str, float]) -> Labelled:
    return {(label,): value for label, value in counts.items()}


def _given(engine: Any) -> Labelled:
    if engine.num_requests is None:  # there is no other
        return {}
    by_prefix = engine.num_given_by_prefix
    return _by({"prefix": by_prefix, "load": engine.num_given - by_prefix})


def _used(stats: Mapping[str, Any]) -> float:
    blocks = stats["blocks"]
    return float(blocks["used"] / blocks["total"]) if blocks["total"] else 0.0


def _info(stats: Mapping[str, Any]) -> Labelled:
    resolved = stats["resolved"]
    return {tuple(str(resolved[name]) for name in INFO): 1.0}


def _captured(stats: Mapping[str, Any]) -> Labelled:
    sizes = stats["cuda_graphs"]["sizes"]
    return {
        (kind,): float(sum(1 for own, _ in sizes if own == kind))
        for kind in sorted({own for own, _ in sizes})
    }


def _accepted(stats: Mapping[str, Any]) -> Labelled:
    counts = stats["speculation"]["accepted_by_place"]
    return {(str(place),): float(count) for place, count in enumerate(counts)}


INFO = ("device", "dtype", "kv_cache_dtype", "quantization", "attention")

# Read from each engine's Runtime.stats(); left out while it does not step.
ENGINE_FAMILIES = _of_each_engine(
    _gauge("num_requests_running", "Requests in the running batch.", lambda s: s["requests"]["running"]),
    _gauge("kv_cache_usage_perc", "Share of KV-cache blocks that requests hold, 0 to 1.", _used),
    _gauge(
        "kv_cache_blocks",
        "KV-cache blocks: used by requests, cached until taken, free, and total.",
        lambda s: _by(s["blocks"]),
        "state",
    ),
    _counter(
        "num_preemptions",
        "Requests that gave their blocks back to be computed again.",
        lambda s: s["preemptions"],
    ),
    _counter(
        "num_forced_tokens",
        "Tokens of answers that came without a sample, as their form left no other.",
        lambda s: s["forced_tokens"],
    ),
    _counter(
        "spec_decode_num_drafts",
        "Times that a request had draft tokens in a step.",
        lambda s: s["speculation"]["drafts"],
    ),
    _counter(
        "spec_decode_num_draft_tokens",
        "Draft tokens that steps verified.",
        lambda s: s["speculation"]["draft_tokens"],
    ),
    _counter(
        "spec_decode_num_accepted_tokens",
        "Draft tokens that held.",
        lambda s: s["speculation"]["accepted_tokens"],
    ),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that held, by their place among those of a request in a step, from 0.",
        _accepted,
        "position",
    ),
    _counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s["prefix_cache"]["queried_tokens"],
    ),
    _counter(
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda s: s["prefix_cache"]["hit_tokens"],
    ),
    _gauge("swap_blocks_used", "Blocks of preempted requests in host memory.", lambda s: s["swap"]["used"]),
    _counter(
        "swap_out_bytes", "Bytes copied from the KV cache to host memory.", lambda s: s["swap"]["out_bytes"]
    ),
    _counter(
        "swap_in_bytes", "Bytes copied from host memory to the KV cache.", lambda s: s["swap"]["in_bytes"]
    ),
    _gauge("cuda_graphs_captured", "Captured sizes of steps by their kind.", _captured, "kind"),
    _gauge("cuda_graph_bytes", "Device memory that captures take.", lambda s: s["cuda_graphs"]["bytes"]),
    _counter(
        "cuda_graph_replays",
        "Steps that replayed a captured CUDA graph.",
        lambda s: s["cuda_graphs"]["replays"],
    ),
    _counter(
        "cuda_graph_tokens",
        "Tokens that replays computed, without padding.",
        lambda s: s["cuda_graphs"]["tokens"],
    ),
    _counter(
        "cuda_graph_padded_tokens",
        "Tokens that replays computed only to fill a captured size.",
        lambda s: s["cuda_graphs"]["padded_tokens"],
    ),
    _counter("eager_steps", "Steps that replayed no CUDA graph.", lambda s: s["cuda_graphs"]["eager_steps"]),
    _counter(
        "late_builds", "Kernels built in the middle of a request.", lambda s: s["compile"]["recompiles"]
    ),
    _gauge("engine_info", "1; its labels say what serves.", _info, *INFO),
)

# Read from the numbers of requests by where they wait: for admission by the server, or in the engine's queue.
QUEUE_FAMILIES = (
    _gauge("num_requests_waiting", "Requests that wait, wherever.", lambda w: sum(w.values())),
    _gauge(
        "num_requests_waiting_by_place",
        "Requests that wait for the server's admission, or in the engine.",
        _by,
        "place",
    ),
)

# Read from each engine's EngineHealth, which never waits.
HEALTH_FAMILIES = _of_each_engine(
    _gauge(
        "engine_up",
        "1 while the engine can step; 0 while it is starting, hangs or is lost.",
        lambda e: e.health.ok,
    ),
    _counter("engine_steps", "Steps of the engine.", lambda e: e.health.status.num_steps),
    _gauge(
        "engine_step_seconds",
        "How long the step that runs now has been running; 0 if none runs.",
        lambda e: e.health.status.step_seconds or 0.0,
    ),
    _gauge(
        "engine_takes_requests", "1 while it is given requests; 0 while drained.", lambda e: e.takes_requests
    ),
    _counter(
        "engine_requests",
        "Of several engines: answers given to this one, as it knew the prompt's beginning, or by load.",
        _given,
        "by",
    ),
)

# Read from the server's own books.
SERVER_FAMILIES = (
    _counter(
        "prompt_tokens", "Tokens of prompts whose first answer has ended.", lambda m: m.num_prompt_tokens
    ),
    _counter("generation_tokens", "Tokens generated.", lambda m: m.num_generated_tokens),
    _counter(
        "request_success",
        "Answers that ended, by why.",
        lambda m: _by(m.finished_by_reason),
        "finished_reason",
    ),
    _histogram(
        "time_to_first_token_seconds", "From being queued to the first token.", lambda m: m.first_token
    ),
    _histogram(
        "inter_token_latency_seconds",
        "From one token to the next, as they reach the server.",
        lambda m: m.between_tokens,
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "From one token to the next, as an answer's mean.",
        lambda m: m.per_token,
    ),
    _histogram(
        "e2e_request_latency_seconds", "From being queued to the end of an answer.", lambda m: m.whole
    ),
    _histogram("request_queue_time_seconds", "From being queued to the first step.", lambda m: m.queue),
    _histogram(
        "request_prefill_time_seconds", "From the first step to the first token.", lambda m: m.prefill
    ),
    _histogram("request_decode_time_seconds", "From the first token to the end.", lambda m: m.decode),
    _histogram("request_inference_time_seconds", "From the first step to the end.", lambda m: m.inference),
    _histogram("request_prompt_tokens", "Tokens of a prompt.", lambda m: m.prompt_lengths),
    _histogram("request_generation_tokens", "Tokens of an answer.", lambda m: m.output_lengths),
    _histogram("request_params_max_tokens", "max_tokens, where it was given.", lambda m: m.max_tokens),
    _histogram("request_params_n", "Answers asked for to a prompt.", lambda m: m.num_answers),
    _histogram(
        "iteration_tokens_total", "Tokens that a step generated, for all requests.", lambda m: m.step_tokens
    ),
    _counter(
        "http_requests",
        "HTTP requests by route and status; 499: the client left before an answer.",
        lambda m: m.http_requests,
        "route",
        "status",
    ),
    _counter(
        "requests_refused",
        "Requests that were not admitted, by why.",
        lambda m: _by(m.refused_by_reason),
        "reason",
    ),
)

# Read from the books of the first model, for all of the server.
PROCESS_FAMILIES = (
    _histogram(
        "event_loop_lag_seconds", "How late the server's event loop ran what was due.", lambda m: m.loop_lag
    ),
)

# Read from the books of each of several models.
SWAP_FAMILIES = (
    _gauge("model_resident", "Of several models: 1 for one that is awake, else 0.", lambda m: m.is_resident),
    _counter("model_swaps", "Of several models: times that one was woken.", lambda m: m.swap.count),
    _counter(
        "model_swap_failures",
        "Of several models: times that one could not be woken, or none could make room for it.",
        lambda m: m.num_failed_swaps,
    ),
    _histogram(
        "model_swap_seconds",
        "Of several models: to put one to sleep and wake this one.",
        lambda m: m.swap,
    ),
)

FAMILIES = (
    *SERVER_FAMILIES,
    *PROCESS_FAMILIES,
    *SWAP_FAMILIES,
    *QUEUE_FAMILIES,
    *ENGINE_FAMILIES,
    *HEALTH_FAMILIES,
)
