"""A worker put together from weights and a plan: cache, runner, captures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...common.errors import UnsupportedError
from ...common.logging import get_logger
from ...common.progress import Progress
from ...compiler.execution.cuda_graphs import CudaGraphs
from ...compiler.execution.plan import Compiled, Plan
from ...compiler.passes.gemms import Gemm
from ...custom_ops._shared import registry
from ...custom_ops._shared.fp8 import FP8
from ...models.checkpoints.loaded_weights import LoadedWeights
from ...models.heads.definition import HeadDefinition
from ..speculation.config import spare_columns
from ..structured_output.compiler import GrammarCompiler
from ..worker.adapters import Adapted
from ..worker.attention import AttentionBackend, PagedAttention, allocate_caches
from ..worker.device_memory import DeviceMemory
from ..worker.grammar_masks import NewMatcher
from ..worker.graph_runner import Forward
from ..worker.host_blocks import HostBlocks
from ..worker.input_batch import InputBatch
from ..worker.logits_adjuster import load_kernels
from ..worker.model_runner import ModelRunner
from ..worker.model_weights import ModelWeights
from ..worker.pooler import Pooler
from ..worker.sampler import Logits
from ..worker.stage_link import StageLink
from ..worker.vocabulary_part import VocabularyPart
from . import memory
from .adapted_build import new_adapted_parts
from .captures import capture, new_cuda_graphs
from .drafter_build import LoadedDrafter, NewModelDrafter, drafter_caches, new_model_drafter
from .drafters import new_drafter
from .forwards import cpu_call_graphs_of, forward_of, logits_of, pooler_of, vocabulary_part_of
from .kernel_choice import choose_gemm_kernels
from .loaded import LoadedWorker
from .resolve import least_of_ranks
from .resolved import ResolvedRuntime
from .stage_build import stage_build
from .stopwatch import Stopwatch
from .threads import num_cores, usable_cpus
from .warm_manifest import LateBuilds
from .weight_sources import source_of

logger = get_logger("runtime")
NewRunner = Callable[[ResolvedRuntime, CudaGraphs | None], ModelRunner]


def build_worker(
    resolved: ResolvedRuntime,
    *,
    attention: AttentionBackend,
    compiled: Compiled | None,
    compiled_adapted: Compiled | None,
    weights: LoadedWeights,
    drafter: LoadedDrafter | None,
    num_valid_ids: int,
    grammars: GrammarCompiler | None,
    progress: Progress,
    watch: Stopwatch,
) -> LoadedWorker:
    """What runs steps; on a GPU its cache takes what a trial run of the largest step leaves.

    Raises NotWarmError where require_warm and kernels of GEMMs are not measured, ConfigError where the GPU
    has room for no block beside the step.
    """
    plans = [one.plan for one in (compiled, compiled_adapted) if one is not None]
    gemm_kernels = _choose_gemm_kernels(resolved, plans, drafter, progress)  # before anything is captured
    registry.select("sample", device=resolved.device, dtype=resolved.dtype)  # built now, not amid a request
    watch.lap("autotune")
    new_runner = _new_runners(
        resolved,
        attention,
        compiled,
        compiled_adapted,
        weights,
        num_valid_ids,
        grammars,
        drafter,
    )
    resolved = _with_final_cache(resolved, new_runner)
    runner = new_runner(resolved, cuda_graphs := new_cuda_graphs(resolved))
    watch.lap("kv_cache")
    runner.profile(min(2, resolved.max_num_batched_tokens), 1)  # builds what else a step calls
    watch.lap("kernels")
    if cuda_graphs is not None:
        capture(runner, resolved, progress)
        watch.lap("cuda_graphs")
    compile_config = resolved.config.compile_config
    return LoadedWorker(
        resolved=resolved,
        runner=runner,
        cuda_graphs=cuda_graphs,
        compiled=compiled,
        compiled_adapted=compiled_adapted,
        weights=weights,
        drafter=drafter,
        attention=attention.name,
        gemm_kernels=gemm_kernels,
        late_builds=LateBuilds(strict=bool(compile_config and compile_config.strict)),
    )


def gemms_of(plans: Iterable[Plan], resolved: ResolvedRuntime) -> tuple[Gemm, ...]:
    """The GEMMs that plans leave to our ops, and those around them, which always are: that of the LM head."""
    dtype = str(resolved.dtype).removeprefix("torch.")
    gemms = [
        Gemm(
            kind="linear",
            rows=rows,
            columns=columns,
            dtype=dtype,
            batch_invariant=resolved.config.batch_invariant,
        )
        for rows, columns in _shapes_around(resolved)
    ]
    return (*(gemm for plan in plans for gemm in plan.gemms), *gemms)


def _shapes_around(resolved: ResolvedRuntime) -> list[tuple[int, ...]]:
    """Of the projections that are no part of the plan."""
    model, specs = resolved.model, resolved.schemes.specs
    if isinstance(resolved.definition, HeadDefinition):
        return [specs[name].shape for name in ("fc", "lm_head") if name in specs]
    return [(model.vocab_size, model.hidden_size)] if "lm_head" in specs else []


def _choose_gemm_kernels(
    resolved: ResolvedRuntime, plans: Iterable[Plan], drafter: LoadedDrafter | None, progress: Progress
) -> tuple[str, ...]:
    gemms = gemms_of(plans, resolved)
    if resolved.drafter is not None and drafter is not None:
        gemms += gemms_of([drafter.compiled.plan] if drafter.compiled else [], resolved.drafter)
    return choose_gemm_kernels(
        tuple(dict.fromkeys(gemms)),
        resolved.device,
        resolved.dtype,
        resolved.store,
        require_warm=resolved.config.require_warm,
        progress=progress,
    )


def _with_final_cache(resolved: ResolvedRuntime, new_runner: NewRunner) -> ResolvedRuntime:
    """The same with the blocks that fit beside weights, captures and the largest step, which is tried."""
    if resolved.device.type != "cuda" or resolved.config.num_kv_blocks is not None:
        return resolved
    trial = new_runner(replace(resolved, num_kv_blocks=2), None)
    torch.cuda.reset_peak_memory_stats(resolved.device)
    before = torch.cuda.memory_allocated(resolved.device)
    num_tokens = resolved.max_num_batched_tokens
    trial.profile(num_tokens, min(resolved.max_num_seqs, num_tokens))
    torch.cuda.synchronize(resolved.device)
    activations = torch.cuda.max_memory_allocated(resolved.device) - before
    del trial
    torch.cuda.empty_cache()
    blocks = least_of_ranks(memory.blocks_left(resolved, activations), resolved.world_size)
    return replace(resolved, num_kv_blocks=blocks)


def _new_runners(
    resolved: ResolvedRuntime,
    attention: AttentionBackend,
    compiled: Compiled | None,
    compiled_adapted: Compiled | None,
    weights: LoadedWeights,
    num_valid_ids: int,
    grammars: GrammarCompiler | None,
    drafter: LoadedDrafter | None,
) -> NewRunner:
    """A function that makes runners of one model, each with a cache of its own."""
    tensors, stage = weights.by_name | resolved.rope_tables(), stage_build(resolved)
    is_last = resolved.stage is None or resolved.stage.is_last
    logits = logits_of(resolved, tensors) if resolved.generates and is_last else None
    part = None if logits is None else vocabulary_part_of(resolved, tensors, num_valid_ids)
    drafts: NewModelDrafter | None = None
    owned = [ModelWeights(weights, source_of(resolved))]
    if drafter is not None and drafter.weights is not None and resolved.own_drafter is not None:
        assert logits is not None, "a drafter for a model that makes no tokens"
        owned.append(ModelWeights(drafter.weights, source_of(resolved.own_drafter)))
        drafts = partial(
            new_model_drafter, loaded=drafter, tensors=tensors, logits=logits, num_valid_ids=num_valid_ids
        )
    return partial(
        _new_runner,
        backend=attention,
        forward=forward_of(resolved, compiled, tensors, stage),
        new_adapted=new_adapted_parts(resolved, attention, compiled_adapted, tensors, stage),
        stage_link=None if stage is None else stage.link(),
        logits=logits,
        vocabulary_part=part,
        pooler=pooler_of(resolved, tensors) if is_last else None,
        new_model_drafter=drafts,
        kv_scales=kv_scales_of(resolved, weights.kv_scales),
        num_valid_ids=num_valid_ids,
        new_matcher=None if grammars is None or not is_last else grammars.matcher,
        model_weights=owned,
    )


def _new_runner(
    resolved: ResolvedRuntime,
    cuda_graphs: CudaGraphs | None,
    *,
    backend: AttentionBackend,
    forward: Forward,
    new_adapted: Callable[[], Adapted] | None,
    stage_link: StageLink | None,
    logits: Logits | None,
    vocabulary_part: VocabularyPart | None,
    pooler: Pooler | None,
    kv_scales: Sequence[tuple[float, float]],
    num_valid_ids: int,
    new_matcher: NewMatcher | None,
    new_model_drafter: NewModelDrafter | None,
    model_weights: Sequence[ModelWeights],
) -> ModelRunner:
    groups, slots = memory.own_groups(resolved), memory.swap_slots(resolved)
    caches = allocate_caches(
        num_layers=memory.layers_of_block(groups),
        num_blocks=memory.pool_blocks(resolved.num_kv_blocks, groups),
        block_size=resolved.block_size,
        num_kv_heads=resolved.model.num_kv_heads,
        head_dim=resolved.model.head_dim,
        dtype=resolved.kv_cache_dtype,
        device=resolved.device,
    )
    load_kernels(resolved.device, resolved.dtype)
    own = drafter_caches(resolved)
    return ModelRunner(
        forward=forward,
        logits=logits,
        vocabulary_part=vocabulary_part,
        pooler=pooler,
        attention=_paged_attention(resolved, backend, caches, groups, kv_scales),
        input_batch=_new_input_batch(resolved, len(groups)),
        num_valid_ids=num_valid_ids,
        cuda_graphs=cuda_graphs,
        cpu_call_graphs=cpu_call_graphs_of(resolved, backend, forward),
        host_blocks=HostBlocks([*caches, *own], slots) if slots else None,
        new_matcher=new_matcher,
        jump_forward=resolved.config.jump_forward,
        num_mask_threads=_num_mask_threads(resolved.device),
        drafter=new_model_drafter(resolved, own) if new_model_drafter else new_drafter(resolved),
        adapted=new_adapted() if new_adapted else None,
        stage_link=stage_link,
        memory=DeviceMemory(model_weights, [*caches, *own]),
    )


def _new_input_batch(resolved: ResolvedRuntime, num_groups: int) -> InputBatch:
    block_size, k = resolved.block_size, resolved.max_drafts
    return InputBatch(
        max_num_seqs=resolved.max_num_seqs,
        max_num_tokens=resolved.max_num_batched_tokens,
        max_blocks_per_seq=-(-resolved.max_model_len // block_size) + spare_columns(k, block_size),
        block_size=resolved.block_size,
        vocab_size=resolved.model.vocab_size,
        device=resolved.device,
        num_groups=num_groups,
        max_drafts=resolved.max_drafts,
        max_num_samples=resolved.max_num_samples,
    )


def _paged_attention(
    resolved: ResolvedRuntime,
    backend: AttentionBackend,
    caches: Sequence[tuple[Tensor, Tensor]],
    groups: Sequence[memory.LayerGroup],
    kv_scales: Sequence[tuple[float, float]],
) -> PagedAttention:
    """A layer's keys and values lie where those of its place in every other group do, in other blocks."""
    where = {
        layer: (group, place) for group, own in enumerate(groups) for place, layer in enumerate(own.layers)
    }
    places = [where.get(layer) for layer in range(resolved.model.num_layers)]
    return PagedAttention(
        backend,
        [None if place is None else caches[place[1]] for place in places],
        resolved.definition.attention(resolved.model),
        [0 if place is None else place[0] for place in places],
        kv_scales,
        resolved.config.batch_invariant,
    )


def kv_scales_of(resolved: ResolvedRuntime, scales: Mapping[str, Tensor]) -> list[tuple[float, float]]:
    """What each layer's keys and values in FP8 are multiplied by: the checkpoint's, or 1.

    UnsupportedError where heads of a layer have scales of their own.
    """
    num_layers = resolved.model.num_layers
    if resolved.kv_cache_dtype != FP8:
        return [(1.0, 1.0)] * num_layers
    wanted = [f"layers.{layer}.{name}_scale" for layer in range(num_layers) for name in "kv"]
    missing = [name for name in wanted if name not in scales]
    if missing and resolved.checkpoint is not None:
        logger.warning(
            "kv_cache_dtype is 'fp8' and the checkpoint has no scales of keys and values for it (%d of %d "
            "are missing, the first %s): they are stored with a scale of 1",
            len(missing),
            len(wanted),
            missing[0],
        )
    return [
        (_scale_of(f"layers.{layer}.k_scale", scales), _scale_of(f"layers.{layer}.v_scale", scales))
        for layer in range(num_layers)
    ]


def _scale_of(name: str, scales: Mapping[str, Tensor]) -> float:
    found = set(scales[name].tolist()) if name in scales else {1.0}
    if len(found) > 1:
        raise UnsupportedError(
            f"kv_cache_dtype is 'fp8', and {name} differs from head to head; wanted one a layer, or 'auto'"
        )
    return float(found.pop())


def _num_mask_threads(device: torch.device) -> int:
    """Cores beside the one that steps; none where the step itself has all of them."""
    return max(1, num_cores(usable_cpus()) - 1) if device.type == "cuda" else 0
