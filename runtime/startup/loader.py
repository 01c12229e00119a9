"""From a model's name to a runtime that is ready: weights and tokenizer are read while the compiler works."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...common.errors import ConfigError, LoadError
from ...common.logging import get_logger
from ...common.memory_errors import memory_explained
from ...common.progress import Progress
from ...common.store import Store
from ...compiler import cache
from ...compiler.compile import compile_program
from ...compiler.execution.plan import Compiled
from ...compiler.passes.gemms import Gemm
from ...compiler.torch_internals.torch_section import neutral
from ...custom_ops._shared.ledger import LEDGER, Watcher, watched
from ...custom_ops._shared.triton_cache import keep_triton_kernels
from ...custom_ops.all_reduce.cuda_group import CudaGroup
from ...custom_ops.all_reduce.gloo_group import GlooGroup
from ...custom_ops.all_reduce.group import (
    MirrorGroup,
    current_group,
    current_world,
    group_of_thread,
    said_by_all,
    set_group,
)
from ...models.checkpoints.loaded_weights import LoadedWeights
from ...models.checkpoints.weights import dummy_weights, load_weights, read_checkpoint
from ...models.config import ModelConfig, read_model_config
from ...models.generation_config import GenerationDefaults, read_generation_config
from ...models.heads.checkpoint import read_head, target_ids
from ...models.heads.definition import HeadDefinition
from ...models.sharding import config_of_rank, sharding_of
from .. import IMPORT_STARTED
from ..config import RuntimeConfig
from ..engine.input_processor import grammar_compiler
from ..executor.uniproc import UniprocExecutor
from ..sampling_params import describe_defaults
from ..tokenization.tokenizer import Tokenizer, load_tokenizer
from ..worker.attention import AttentionBackend, check_layer, check_name, select_backend
from . import warm_manifest as warm
from .builder import build_worker, gemms_of
from .drafter_build import LoadedDrafter
from .drafting import check_vocabulary
from .engine_builder import build_engine
from .folder import find_folder
from .kernel_choice import measurements_kept, missing_measurements, require_one_order
from .loaded import LoadedRuntime, LoadedWorker, Vocabulary
from .memory import give_back_cached
from .memory_report import Sizing, size
from .over_processes import load_over_processes
from .pooling import definition_of, pooling_of
from .prebuild import building_ahead
from .resolve import resolve, resolve_device, resolve_dtype
from .resolved import ResolvedRuntime
from .schemes import resolve_schemes
from .stopwatch import Stopwatch
from .threads import settle_threads
from .worker_facts import facts_of

IMPORT_SECONDS = time.perf_counter() - IMPORT_STARTED  # torch above all
logger = get_logger("runtime")
OnFolder = Callable[[Path], None]


def load(config: RuntimeConfig, progress: Progress, on_folder: OnFolder | None = None) -> LoadedRuntime:
    """The model loaded, compiled and ready. Raises LaminaErrors alone, and leaves nothing running then.

    on_folder: called with the checkpoint's folder, before anything large is read from it.
    """
    with neutral(), watched(_on_build(config, progress)), _memory_explained(config):
        return _load(config, progress, on_folder)


def load_rank(config: RuntimeConfig, progress: Progress, watch: Stopwatch) -> LoadedWorker:
    """The same for one worker in a process of its own, without the engine."""
    with neutral(), watched(_on_build(config, progress)), _memory_explained(config):
        resolved = _agreed(resolve_runtime(config, progress))
        if resolved.device.type == "cuda" and resolved.model.ranks > 1:
            host, world = current_group(), current_world() if resolved.stages else None
            assert isinstance(host, GlooGroup), "a rank without a process"
            set_group(CudaGroup(host, resolved.device), world)
        watch.lap("config")
        return load_worker(resolved, progress, watch)[0]


def _memory_explained(config: RuntimeConfig) -> AbstractContextManager[None]:
    remedy = "lower num_kv_blocks or memory_fraction, use a smaller dtype, or give the process more"
    return memory_explained(f"{config.model} was loaded", remedy)


def _agreed(resolved: ResolvedRuntime) -> ResolvedRuntime:
    """The same with as much memory for blocks as every rank has: they were sized one after the other."""
    sizes = said_by_all(current_world(), [resolved.num_kv_blocks, resolved.swap_bytes])
    blocks, swap_bytes = map(min, zip(*sizes, strict=True))
    return replace(resolved, num_kv_blocks=blocks, swap_bytes=swap_bytes)


def _on_build(config: RuntimeConfig, progress: Progress) -> Watcher:
    return warm.refuse if config.require_warm else partial(warm.permit, progress)


def missing(config: RuntimeConfig, progress: Progress) -> warm.Lacks:
    """What serving with these settings would have to make; reads no weights, and raises what load would."""
    resolved = resolve_runtime(config, progress)
    store, factors = resolved.store, resolved.plan_factors()
    lacks, gemms = _lacks_of_plan(resolved)
    beside = [("of steps with adapters", resolved.adapted())] if config.lora is not None else []
    beside += [("of the drafter", resolved.drafter)] if resolved.drafter is not None else []
    for whose, other in beside:
        own, own_gemms = _lacks_of_plan(other)
        lacks, gemms = lacks + [f"{whose} {lack}" for lack in own], gemms + own_gemms
    lacks += warm.missing_kernels(store, warm.serving_factors(resolved, factors))
    unmeasured = missing_measurements(gemms, resolved.device, resolved.dtype, store)
    return warm.Lacks(missing=tuple(lacks), unmeasured=tuple(unmeasured))


def _lacks_of_plan(resolved: ResolvedRuntime) -> tuple[list[str], tuple[Gemm, ...]]:
    """What a start would have to make of a plan, and the GEMMs that are called with it."""
    factors, config = resolved.plan_factors(), resolved.config.compile_config
    if factors is None or config is None:
        return [], gemms_of([], resolved)
    lacks = cache.missing_parts(factors, resolved.store, must_be_checked=config.verify)
    loaded = None if lacks else cache.load_plan(factors, resolved.store, resolved.device)
    return lacks, gemms_of([loaded[0]] if loaded else [], resolved)


def sizing(config: RuntimeConfig, progress: Progress) -> Sizing:
    """What fits with these settings; reads no weights. ConfigError where not even a block does."""
    return size(resolve_runtime(config, progress))


def compile_only(resolved: ResolvedRuntime, progress: Progress) -> Compiled:
    """The plan of a model with its settings, without its weights. ConfigError where compile is False."""
    compiled = _compile(resolved, progress)
    if compiled is None:
        raise ConfigError("compile is False; wanted True or a CompileConfig, to have anything to explain")
    return compiled


def note_use(resolved: ResolvedRuntime) -> None:
    """Write into the cache what a runtime has used so far, for `missing`."""
    store, folder, factors = resolved.store, resolved.folder, resolved.plan_factors()
    plan = None if factors is None else cache.plan_key(factors)
    serving = warm.serving_factors(resolved, factors)
    measured = measurements_kept(resolved.device, resolved.dtype, store)
    warm.note(store, serving, plan, measured)
    keys = [warm.serving_key(serving), *([] if plan is None else [plan])]
    if resolved.config.lora is not None and (adapted := resolved.adapted().plan_factors()) is not None:
        keys.append(cache.plan_key(adapted))
    if resolved.drafter is not None and (own := resolved.drafter.plan_factors()) is not None:
        warm.note_name(store, [cache.plan_key(own)], resolved.drafter.config.model)
    if folder.parent.parent.parent in (store.root, store.home):
        keys.append(folder.name)  # a folder of the store: a file that was converted
    warm.note_name(store, keys, resolved.config.model)


def resolve_runtime(config: RuntimeConfig, progress: Progress) -> ResolvedRuntime:
    """The model's files, shapes and settings, before anything large is read.

    Raises ConfigError for settings that cannot be had, LoadError for files that are missing or damaged, and
    UnsupportedError for a model, device or scheme that cannot be served.
    """
    check_name(config.attention)
    store = Store(config.cache_dir)
    device = resolve_device(config.device)
    LEDGER.keep_in(store)
    if device.type == "cuda":
        keep_triton_kernels(store)
    else:
        settle_threads(config.data_parallel)  # first of all: code that is generated counts on it
    folder = find_folder(config, store, device, progress)
    model, defaults = _read_configs(folder, config)
    is_dummy = config.load_format == "dummy"
    definition = definition_of(folder, model, is_dummy=is_dummy)
    pooling = pooling_of(config, folder, model)
    checkpoint = None if is_dummy else read_checkpoint(definition, model, folder)
    schemes = resolve_schemes(config.quantization, folder, definition.parameters(model))
    schemes.check(device)
    if config.batch_invariant:
        schemes.check_batch_invariant(device)
    ranks = config.tensor_parallel
    if ranks > 1:
        schemes = schemes.of_rank(sharding_of(definition, model, ranks))
    return resolve(
        config,
        store=store,
        folder=folder,
        checkpoint=checkpoint,
        model=config_of_rank(model, ranks),
        definition=definition,
        pooling=pooling,
        defaults=defaults,
        schemes=schemes,
        dtype=resolve_dtype(config.dtype, model.dtype, device),
        device=device,
        progress=progress,
    )


def read_weights(resolved: ResolvedRuntime, progress: Progress) -> LoadedWeights:
    """The weights, projections as their scheme keeps them. LoadError where they cannot be read or held."""
    into: dict[str, Any] = {"dtype": resolved.dtype, "device": resolved.device, "rank": resolved.rank}
    into["schemes"] = resolved.own_schemes
    give_back_cached(resolved.device)
    try:
        if resolved.checkpoint is None:
            return dummy_weights(resolved.definition, resolved.model, seed=resolved.config.seed, **into)
        return load_weights(resolved.checkpoint, progress=progress, **into)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"the weights of {resolved.folder} do not fit on {resolved.device}: {error}; use a smaller dtype"
        ) from error


def _load(config: RuntimeConfig, progress: Progress, on_folder: OnFolder | None) -> LoadedRuntime:
    watch = Stopwatch()
    watch.seconds["imports"] = IMPORT_SECONDS
    config.parallel.check_group(current_group().size)
    resolved = resolve_runtime(config, progress)
    if on_folder is not None:
        on_folder(resolved.folder)
    _say_what_fits(size(resolved), is_asked_for=config.max_model_len is not None)
    watch.lap("config")
    if config.parallel.has_processes and current_group().size == 1:
        return load_over_processes(resolved, progress, watch, read_vocabulary)
    worker, vocabulary = load_worker(resolved, progress, watch)
    return engine_over(worker, vocabulary, watch)


def engine_over(worker: LoadedWorker, vocabulary: Vocabulary, watch: Stopwatch) -> LoadedRuntime:
    """The runtime that serves with a worker in this process."""
    return build_engine(
        worker.resolved,
        UniprocExecutor(worker.runner, facts_of(worker, partial(note_use, worker.resolved))),
        worker=worker,
        vocabulary=vocabulary,
        attention=worker.attention,
        gemm_kernels=worker.gemm_kernels,
        late_builds=worker.late_builds,
        watch=watch,
    )


def load_worker(
    resolved: ResolvedRuntime, progress: Progress, watch: Stopwatch
) -> tuple[LoadedWorker, Vocabulary]:
    """A worker ready to run steps, and what the ids of its model mean."""
    with building_ahead(resolved):
        return _load_worker(resolved, progress, watch)


def _load_worker(
    resolved: ResolvedRuntime, progress: Progress, watch: Stopwatch
) -> tuple[LoadedWorker, Vocabulary]:
    with ThreadPoolExecutor(max_workers=3) as pool:
        weights_read = pool.submit(watch.overlap, "weights", partial(read_weights, resolved, progress))
        vocabulary_read = pool.submit(watch.overlap, "tokenizer", partial(read_vocabulary, resolved))
        inherited = copy_context()  # whoever is asked before something is built
        attention_built = pool.submit(
            watch.overlap, "kernels", partial(inherited.run, select_attention, resolved)
        )
        reads = weights_read, vocabulary_read, attention_built
        compiled = _compile(resolved, _ending_early(progress, reads))
        has_adapters = resolved.slot_layout is not None
        compiled_adapted = _compile(resolved.adapted(), progress) if has_adapters else None
        watch.lap("compile")
        watch.split("compile", compiled.seconds if compiled else {})
        attention = attention_built.result()
        watch.lap("kernels")
        weights = weights_read.result()
        for sentence in weights.sentences():
            logger.info("%s", sentence)
        watch.lap("weights")
        vocabulary = vocabulary_read.result()
        check_vocabulary(resolved, vocabulary.tokenizer)
        watch.lap("tokenizer")
    drafter = None if resolved.drafter is None else _load_drafter(resolved, resolved.drafter, progress)
    watch.lap("drafter")
    worker = build_worker(
        resolved,
        attention=attention,
        compiled=compiled,
        compiled_adapted=compiled_adapted,
        weights=weights,
        drafter=drafter,
        num_valid_ids=vocabulary.num_valid_ids,
        grammars=vocabulary.grammars,
        progress=progress,
        watch=watch,
    )
    note_use(worker.resolved)
    warm.say_what_was_loaded(resolved.store, compiled, watch.seconds)
    return worker, vocabulary


def read_vocabulary(resolved: ResolvedRuntime) -> Vocabulary:
    """What the ids of a model mean, by its tokenizer and whatever else says where answers end."""
    tokenizer = load_tokenizer(resolved.folder, override=resolved.config.tokenizer)
    vocab_size, eos = resolved.model.vocab_size, _eos_token_ids(resolved, tokenizer)
    num_valid_ids = min(vocab_size, tokenizer.size) if tokenizer else vocab_size
    grammars = grammar_compiler(tokenizer, num_valid_ids, eos) if tokenizer else None
    return Vocabulary(tokenizer, eos, num_valid_ids, grammars)


def _load_drafter(target: ResolvedRuntime, drafter: ResolvedRuntime, progress: Progress) -> LoadedDrafter:
    """A model that drafts, compiled and read; its weights in the stage alone that drafts.

    Its plan is read in all stages: they choose kernels for the same GEMMs.
    """
    ids = None
    if isinstance(drafter.definition, HeadDefinition):
        ids = target_ids(read_head(drafter.folder, is_dummy=drafter.checkpoint is None))
    return LoadedDrafter(
        attention=select_attention(drafter),
        compiled=_compile(drafter, progress),
        weights=read_weights(drafter, progress) if target.own_drafter is not None else None,
        target_ids=ids,
    )


def _ending_early(progress: Progress, reads: Sequence[Future[Any]]) -> Progress:
    """The same progress, which raises what has failed of these: damage ends a start before it compiles."""

    def report(stage: str, fraction: float, detail: str) -> None:
        for read in reads:
            if read.done():
                read.result()
        progress(stage, fraction, detail)

    return report


def _say_what_fits(fit: Sizing, *, is_asked_for: bool) -> None:
    level = logging.WARNING if fit.missing_bytes and is_asked_for else logging.INFO
    logger.log(level, "memory: %s", fit.sentence())


def select_attention(resolved: ResolvedRuntime) -> AttentionBackend:
    """The kernels of attention; where they are built, that takes seconds.

    UnsupportedError for those of other bits in other batches, where batch_invariant is set.
    """
    if resolved.config.batch_invariant:
        require_one_order(resolved.device, resolved.dtype)
    return select_backend(
        resolved.config.attention,
        device=resolved.device,
        dtype=resolved.dtype,
        head_dim=resolved.model.head_dim,
        block_size=resolved.block_size,
        kv_cache_dtype=resolved.kv_cache_dtype,
        batch_invariant=resolved.config.batch_invariant,
    )


def _eos_token_ids(resolved: ResolvedRuntime, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every id that ends an answer, by whichever file says so."""
    eos = {*resolved.model.eos_token_ids, *resolved.defaults.eos_token_ids}
    eos |= set(tokenizer.eos_token_ids if tokenizer else ())
    defaults = describe_defaults(resolved.defaults)
    logger.info("eos token ids: %s; sampling defaults of the model: %s", sorted(eos), defaults)
    return frozenset(eos)


def _read_configs(folder: Path, config: RuntimeConfig) -> tuple[ModelConfig, GenerationDefaults]:
    model, defaults = read_model_config(folder), read_generation_config(folder)
    if not config.generation_defaults:  # how to sample is the caller's choice, where the model ends is not
        defaults = GenerationDefaults(eos_token_ids=defaults.eos_token_ids)
    return model, defaults


def _compile(resolved: ResolvedRuntime, progress: Progress) -> Compiled | None:
    """The plan, None where the caller wants the model to run eagerly."""
    config = resolved.config
    if config.compile_config is None:
        return None
    with group_of_thread(MirrorGroup(resolved.model.ranks)):  # other ranks may be busy with something else
        compiled = compile_program(
            resolved.program(),
            config.compile_config,
            config.numerics,
            resolved.store,
            require_warm=config.require_warm,
            progress=progress,
        )
    for layer in compiled.plan.layers:
        check_layer(layer, resolved.model.num_layers)
    return compiled
