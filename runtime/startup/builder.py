"""The engine put together from a bound model: the cache sized, the input batch, the runner, its captures."""

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TextIO

import torch
from torch import Tensor

from ...common.progress import Progress
from ...common.store import Store
from ...compiler.execution.cpu_call_graph import CpuCallGraphs
from ...compiler.execution.cuda_graphs import CudaGraphs
from ...compiler.execution.plan import BoundPlan, Compiled, Plan
from ...compiler.passes.gemms import Gemm
from ...custom_ops import linear
from ...custom_ops._shared import registry
from ...models.checkpoints.loaded_weights import LoadedWeights
from ...models.config import ModelConfig
from ...models.layers import Ops
from ...models.registry import ModelDefinition
from ..config import TOKENS_BESIDE_DECODE, Resolved, RuntimeConfig
from ..engine.engine_core import EngineCore
from ..executor.uniproc import UniprocExecutor
from ..kv_cache.block_pool import BlockPool
from ..kv_cache.manager import KVCacheManager
from ..scheduler.config import SchedulerConfig
from ..scheduler.decision_log import RecordingScheduler, open_recording
from ..scheduler.scheduler import Scheduler
from ..worker.attention import AttentionBackend, PagedAttention, allocate_caches, each_layer_once
from ..worker.graph_runner import Forward
from ..worker.host_blocks import HostBlocks
from ..worker.input_batch import InputBatch
from ..worker.logits_adjuster import load_kernels
from ..worker.model_runner import ModelRunner
from . import memory
from .kernel_choice import settle_products
from .stopwatch import Stopwatch

DECODE_SIZES = (1, 2, 4, *range(8, 257, 8))
MIXED_SIZES = (16, 32, 64, 128, 256, 512)
# Beyond, calling the pieces costs no padding: sizes are recorded while the host is slower, or nearly so.
LARGE_MIXED_SIZES = (768, 1024, 1280, 1536, 1792, 2048)
NEARLY_BOUND = 1.25  # how much longer than the host the card may take
DEPTHS = {"cuda": 2, "cpu": 1}  # steps launched before the oldest is read; a CPU is busy with the step itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What loading brought together."""

    config: RuntimeConfig
    model: ModelConfig
    definition: ModelDefinition
    resolved: Resolved
    attention: AttentionBackend
    compiled: Compiled | None
    loaded: LoadedWeights
    weights: Mapping[str, Tensor]  # the same by name, and the rope tables
    ops: Ops
    num_valid_ids: int  # ids from here on are padding of the vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """An engine with what its statistics are read from."""

    engine: EngineCore
    kv_cache: KVCacheManager
    runner: ModelRunner
    graphs: CudaGraphs | None
    resolved: Resolved
    recording: TextIO | None  # of decisions, to be closed
    products: tuple[str, ...]  # what serves each matrix product, where that is chosen by measurement


def assemble(parts: Parts, store: Store, progress: Progress, watch: Stopwatch) -> Assembled:
    """The engine; on a card the cache takes what a trial run of the largest step leaves."""
    resolved = parts.resolved
    products = _settle_products(parts, store, progress)  # before anything is recorded
    registry.select("sample", device=resolved.device, dtype=resolved.dtype)  # built now, not amid a request
    watch.lap("products")
    if resolved.device.type == "cuda" and parts.config.num_kv_blocks is None:
        blocks = _blocks_left(parts)
        resolved = dataclasses.replace(resolved, num_kv_blocks=blocks)
    graphs = CudaGraphs(resolved.device) if _wants_graphs(parts.config, resolved.device) else None
    runner = _runner(parts, resolved, graphs)
    watch.lap("kv_cache")
    if graphs is not None:
        decode, mixed = graph_sizes(resolved, _launch_bound_tokens(runner, resolved))
        number = runner.plan_captures(decode, mixed)
        for count in range(0 if _records_when_idle(parts.config) else number):
            runner.capture_next()
            progress("graphs", (count + 1) / number, "")
        watch.lap("graphs")
    groups = memory.layer_groups(parts.model)
    kv_cache = KVCacheManager(
        BlockPool(memory.pool_blocks(resolved.num_kv_blocks, groups)),
        resolved.block_size,
        prefix_cache=parts.config.prefix_cache,
        window=groups[0].window,
        sides=[group.window for group in groups[1:]],
        swap_slots=memory.swap_slots(resolved, parts.model),
    )
    limits = SchedulerConfig(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        max_tokens_beside_decode=max(TOKENS_BESIDE_DECODE, resolved.max_num_seqs),
        prefill_chunk=resolved.prefill_chunk,
        max_prefill_tokens=resolved.max_prefill_tokens,
    )
    recording = None if parts.config.record is None else open_recording(parts.config.record)
    scheduler = RecordingScheduler(limits, kv_cache, recording) if recording else Scheduler(limits, kv_cache)
    return Assembled(
        engine=EngineCore(scheduler, UniprocExecutor(runner), depth=DEPTHS[resolved.device.type]),
        kv_cache=kv_cache,
        runner=runner,
        graphs=graphs,
        resolved=resolved,
        recording=recording,
        products=products,
    )


def _settle_products(parts: Parts, store: Store, progress: Progress) -> tuple[str, ...]:
    """What serves the products that the plan leaves to our ops, and the LM head."""
    resolved = parts.resolved
    return settle_products(
        products_of(parts.compiled.plan if parts.compiled else None, parts.model, resolved),
        resolved.device,
        resolved.dtype,
        store,
        require_warm=parts.config.require_warm,
        progress=progress,
    )


def products_of(plan: Plan | None, model: ModelConfig, resolved: Resolved) -> tuple[Gemm, ...]:
    """The products that a plan leaves to our ops, and the LM head, which always is."""
    dtype = str(resolved.dtype).removeprefix("torch.")
    head = Gemm(kind="linear", rows=model.vocab_size, columns=model.hidden_size, dtype=dtype)
    return (*(plan.gemms if plan else ()), head)


def graph_sizes(resolved: Resolved, launch_bound_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes to record: of decode steps in requests, of mixed steps in tokens."""
    most_seqs = min(resolved.max_num_seqs, resolved.max_num_batched_tokens)
    decode = {size for size in DECODE_SIZES if size < most_seqs} | {min(most_seqs, DECODE_SIZES[-1])}
    large = tuple(size for size in LARGE_MIXED_SIZES if size <= launch_bound_tokens)
    mixed = tuple(size for size in MIXED_SIZES + large if size <= resolved.max_num_batched_tokens)
    return tuple(sorted(decode)), mixed


def _launch_bound_tokens(runner: ModelRunner, resolved: Resolved) -> int:
    """Up to how many tokens of a step the host takes longer to call the pieces than the card to run them."""
    most = min(LARGE_MIXED_SIZES[-1], resolved.max_num_batched_tokens)
    if resolved.device.type != "cuda" or most < LARGE_MIXED_SIZES[0]:
        return 0

    def seconds(num_tokens: int) -> float:
        torch.cuda.synchronize(resolved.device)
        started = time.perf_counter()
        runner.profile(num_tokens, 1)
        torch.cuda.synchronize(resolved.device)
        return time.perf_counter() - started

    def median(num_tokens: int) -> float:
        return statistics.median([seconds(num_tokens) for _ in range(4)][1:])  # the first loads and compiles

    # Where the two are near, a recording costs a little memory, and the want of one costs time.
    return int(most * NEARLY_BOUND * median(1) / median(most))


def _wants_graphs(config: RuntimeConfig, device: torch.device) -> bool:
    compile_config = config.compile_config
    if compile_config is None or compile_config.cuda_graphs == "off":
        return False
    return compile_config.cuda_graphs != "auto" or device.type == "cuda"


def _records_when_idle(config: RuntimeConfig) -> bool:
    return config.compile_config is not None and config.compile_config.cuda_graphs == "lazy"


def _blocks_left(parts: Parts) -> int:
    """Blocks that fit beside the weights, the largest step and the recordings, by a trial of that step."""
    resolved = parts.resolved
    trial = _runner(parts, dataclasses.replace(resolved, num_kv_blocks=2), None)
    torch.cuda.reset_peak_memory_stats(resolved.device)
    before = torch.cuda.memory_allocated(resolved.device)
    trial.profile(
        resolved.max_num_batched_tokens, min(resolved.max_num_seqs, resolved.max_num_batched_tokens)
    )
    torch.cuda.synchronize(resolved.device)
    activations = torch.cuda.max_memory_allocated(resolved.device) - before
    del trial
    torch.cuda.empty_cache()
    return memory.blocks_left(resolved, parts.model, parts.config.memory_fraction, activations)


def _runner(parts: Parts, resolved: Resolved, graphs: CudaGraphs | None) -> ModelRunner:
    model, definition = parts.model, parts.definition
    groups = memory.layer_groups(model)
    caches = allocate_caches(
        num_layers=memory.layers_of_block(groups),
        num_blocks=memory.pool_blocks(resolved.num_kv_blocks, groups),
        block_size=resolved.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=resolved.dtype,
        device=resolved.device,
    )
    input_batch = InputBatch(
        max_num_seqs=resolved.max_num_seqs,
        max_num_tokens=resolved.max_num_batched_tokens,
        max_blocks_per_seq=-(-resolved.max_model_len // resolved.block_size),
        block_size=resolved.block_size,
        vocab_size=model.vocab_size,
        device=resolved.device,
        num_groups=len(groups),
    )
    load_kernels(resolved.device, resolved.dtype)
    forward, call_graphs = _forward(parts), None
    if isinstance(forward, BoundPlan) and _wants_cpu_call_graphs(parts):
        call_graphs = CpuCallGraphs(forward)
    return ModelRunner(
        forward=forward,
        logits=partial(_logits, definition, model, _joined(parts), _ops_of_logits(parts)),
        attention=_attention(parts, caches, groups),
        input_batch=input_batch,
        num_valid_ids=parts.num_valid_ids,
        cuda_graphs=graphs,
        cpu_call_graphs=call_graphs,
        host_blocks=HostBlocks(caches, slots) if (slots := memory.swap_slots(resolved, model)) else None,
    )


def _wants_cpu_call_graphs(parts: Parts) -> bool:
    """On a CPU, if attention is kernels: other code may read on the host what changes from step to step."""
    compile_config, attention = parts.config.compile_config, parts.attention
    is_auto = compile_config is not None and compile_config.cuda_graphs == "auto"
    return is_auto and parts.resolved.device.type == "cpu" and attention.name == "cpu"


def _attention(
    parts: Parts, caches: Sequence[tuple[Tensor, Tensor]], groups: Sequence[memory.LayerGroup]
) -> PagedAttention:
    """A layer's keys and values lie where those of its place in every other group do, in other blocks."""
    where = {
        layer: (group, place) for group, own in enumerate(groups) for place, layer in enumerate(own.layers)
    }
    layers = range(parts.model.num_layers)
    return PagedAttention(
        parts.attention,
        [caches[where[layer][1]] for layer in layers],
        parts.definition.attention(parts.model),
        [where[layer][0] for layer in layers],
    )


def _forward(parts: Parts) -> Forward:
    """The compiled plan on its weights, or the model as it is written."""
    if parts.compiled is not None:
        return parts.compiled.plan.bind(parts.weights, parts.resolved.device)

    num_layers, weights = parts.model.num_layers, _joined(parts)

    def eager(token_ids: Tensor, positions: Tensor, attend: PagedAttention) -> Tensor:
        once = each_layer_once(attend, num_layers)
        return parts.definition.forward(parts.model, weights, token_ids, positions, once, parts.ops)

    return eager


def _ops_of_logits(parts: Parts) -> Ops:
    """The model's, but the LM head's product is never left to torch: kernels for few rows are ours."""
    return parts.resolved.scheme.ops(parts.ops._replace(linear=linear))


def _joined(parts: Parts) -> Mapping[str, Tensor]:
    """The weights as the model's functions take them."""
    return parts.resolved.scheme.joiner(parts.loaded.specs)(parts.weights)


def _logits(
    definition: ModelDefinition, model: ModelConfig, weights: Mapping[str, Tensor], ops: Ops, hidden: Tensor
) -> Tensor:
    return definition.logits(model, weights, hidden, ops)
