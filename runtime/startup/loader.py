"""From a model's name to an engine that is ready: weights and tokenizer are read while the compiler works."""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.errors import ConfigError, LoadError
from ...common.logging import get_logger
from ...common.progress import Progress
from ...common.store import Store
from ...compiler import cache
from ...compiler.compile import Program, compile_program, factors_of
from ...compiler.execution.plan import Compiled, ParameterTable
from ...compiler.torch_internals import torch_compat
from ...compiler.torch_internals.torch_section import neutral
from ...custom_ops._shared.ledger import LEDGER, watched
from ...custom_ops._shared.triton_cache import keep_triton_kernels
from ...models import rope
from ...models.checkpoints.gguf import config_of_gguf
from ...models.checkpoints.loaded_weights import LoadedWeights
from ...models.checkpoints.source import resolve_source
from ...models.checkpoints.weights import Checkpoint, dummy_weights, load_weights, read_checkpoint
from ...models.config import GenerationDefaults, ModelConfig, read_generation_config, read_model_config
from ...models.layers import EXACT_OPS, FAST_OPS, Ops
from ...models.quantization.scheme import find_scheme
from ...models.registry import ModelDefinition, find_model
from .. import IMPORT_STARTED
from ..config import Resolved, RuntimeConfig
from ..engine.engine_core import EngineCore
from ..sampling_params import describe_defaults
from ..tokenization.tokenizer import Tokenizer, load_tokenizer
from ..worker.attention import AttentionBackend, check_layer, check_name, select_backend
from . import warm_manifest as warm
from .builder import Assembled, Parts, assemble, products_of
from .kernel_choice import measurements_kept, missing_measurements
from .memory_report import Sizing, size
from .resolve import resolve, resolve_device, resolve_dtype
from .stopwatch import Stopwatch
from .threads import settle_threads

IMPORT_SECONDS = time.perf_counter() - IMPORT_STARTED  # torch above all
logger = get_logger("runtime")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """Everything a runtime holds."""

    found: "Found"
    assembled: Assembled
    parts: Parts
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    eos_token_ids: frozenset[int]
    startup: dict[str, float]
    overlapped: dict[str, float]
    late_builds: warm.LateBuilds

    @property
    def engine(self) -> EngineCore:
        return self.assembled.engine

    @property
    def resolved(self) -> Resolved:
        return self.assembled.resolved


def load(config: RuntimeConfig, progress: Progress) -> Loaded:
    """Load and compile a model; every failure is a LaminaError, and nothing is left running after it."""
    with neutral(), watched(warm.refuse if config.require_warm else partial(warm.permit, progress)):
        return _load(config, progress)


def missing(config: RuntimeConfig, progress: Progress) -> warm.Lacks:
    """What serving with these settings would have to make; weights are not read."""
    found = find(config, progress)
    resolved, store, factors = found.resolved, found.store, found.plan_factors()
    must_be_checked = config.compile_config is not None and config.compile_config.verify
    lacks = [] if factors is None else cache.missing_parts(factors, store, must_be_checked=must_be_checked)
    loaded = None if lacks or factors is None else cache.load_plan(factors, store, resolved.device)
    products = products_of(loaded[0] if loaded else None, found.model, resolved)
    lacks += warm.missing_kernels(store, warm.serving_factors(config, resolved, factors))
    unmeasured = missing_measurements(products, resolved.device, resolved.dtype, store)
    return warm.Lacks(missing=tuple(lacks), unmeasured=tuple(unmeasured))


def sizing(config: RuntimeConfig, progress: Progress) -> Sizing:
    """What fits with these settings, before weights are read."""
    found = find(config, progress)
    return size(config, found.model, found.resolved)


def compile_only(found: "Found", progress: Progress) -> Compiled:
    """The plan of a model with its settings, without its weights."""
    compiled = _compile(found, progress)
    if compiled is None:
        raise ConfigError("compile is False; wanted True or a CompileConfig, to have anything to explain")
    return compiled


def note_use(loaded: Loaded) -> None:
    """Let the cache know what this runtime has used so far, for `missing`."""
    found = loaded.found
    factors = found.plan_factors()
    plan = None if factors is None else cache.plan_key(factors)
    serving = warm.serving_factors(found.config, found.resolved, factors)
    measured = measurements_kept(found.resolved.device, found.resolved.dtype, found.store)
    warm.note(found.store, serving, plan, measured)
    keys = [warm.serving_key(serving), *([] if plan is None else [plan])]
    if found.folder.parent.parent.parent in (found.store.root, found.store.home):
        keys.append(found.folder.name)  # a folder of the store: a file that was converted
    warm.note_name(found.store, keys, found.config.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A model and the settings it is to run with, before anything large is read."""

    config: RuntimeConfig
    store: Store
    folder: Path
    model: ModelConfig
    definition: ModelDefinition
    defaults: GenerationDefaults
    checkpoint: Checkpoint | None  # None: weights are made up
    resolved: Resolved

    def program(self) -> Program:
        """What the compiler is handed."""
        return _program(self.model, self.definition, self.config, self.resolved)

    def ops(self) -> Ops:
        """The operations that the model is written in, by its numerics."""
        return self.resolved.scheme.ops(_ops(self.config))

    def joined(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights as the model's functions take them."""
        return self.resolved.scheme.joiner(self.definition.parameters(self.model))(weights)

    def piece_factors(self) -> dict[str, Any]:
        """What a compiled piece depends on beside its graph."""
        toolchain = torch_compat.toolchain(self.resolved.device)
        return {"toolchain": toolchain, "numerics": self.config.numerics}

    def plan_factors(self) -> dict[str, Any] | None:
        """What the plan depends on, None where the caller wants the model to run eagerly."""
        config = self.config.compile_config
        if config is None:
            return None
        return factors_of(self.program(), config, self.config.numerics, self.store)


def find(config: RuntimeConfig, progress: Progress) -> Found:
    """The model's files, shapes and settings, before anything large is read."""
    check_name(config.attention)
    store = Store(config.cache_dir)
    device = resolve_device(config.device)
    LEDGER.keep_in(store)
    if device.type == "cuda":
        keep_triton_kernels(store)
    else:
        settle_threads()  # first of all: code that is generated counts on it
    folder = _find_folder(config, store, device, progress)
    model, definition, defaults = _read_configs(folder, config)
    is_dummy = config.load_format == "dummy"
    checkpoint = None if is_dummy else read_checkpoint(definition, model, folder)
    find_scheme(config.quantization).check(definition.parameters(model), device)
    return Found(
        config=config,
        store=store,
        folder=folder,
        model=model,
        definition=definition,
        defaults=defaults,
        checkpoint=checkpoint,
        resolved=resolve(config, model, resolve_dtype(config.dtype, model.dtype, device), device),
    )


def _say_what_fits(fit: Sizing, *, is_asked_for: bool) -> None:
    level = logging.WARNING if fit.missing_bytes and is_asked_for else logging.INFO
    logger.log(level, "memory: %s", fit.sentence())


def _load(config: RuntimeConfig, progress: Progress) -> Loaded:
    watch = Stopwatch()
    found = find(config, progress)
    folder, model, definition, resolved = found.folder, found.model, found.definition, found.resolved
    _say_what_fits(size(config, model, resolved), is_asked_for=config.max_model_len is not None)
    watch.lap("config")
    with ThreadPoolExecutor(max_workers=2) as pool:
        weights_read = pool.submit(watch.overlap, "weights", partial(read_weights, found, progress))
        read = partial(load_tokenizer, folder, override=config.tokenizer)
        tokenizer_read = pool.submit(watch.overlap, "tokenizer", read)
        attention = _attention(found)
        watch.lap("kernels")

        def report(stage: str, fraction: float, detail: str) -> None:
            for read in (weights_read, tokenizer_read):
                if read.done():
                    read.result()  # what is damaged is said before the long work of compiling
            progress(stage, fraction, detail)

        compiled = _compile(found, report)
        watch.lap("compile")
        watch.split("compile", compiled.seconds if compiled else {})
        weights = weights_read.result()
        for sentence in weights.sentences():
            logger.info("%s", sentence)
        watch.lap("weights")
        tokenizer = tokenizer_read.result()
        watch.lap("tokenizer")
    parts = Parts(
        config=config,
        model=model,
        definition=definition,
        resolved=resolved,
        attention=attention,
        compiled=compiled,
        loaded=weights,
        weights=with_rope_tables(found, weights),
        ops=found.ops(),
        num_valid_ids=min(model.vocab_size, tokenizer.size) if tokenizer else model.vocab_size,
    )
    assembled = assemble(parts, found.store, progress, watch)
    watch.lap("kv_cache")
    loaded = Loaded(
        found=found,
        assembled=assembled,
        parts=parts,
        tokenizer=tokenizer,
        defaults=found.defaults,
        eos_token_ids=_eos_token_ids(found, tokenizer),
        startup={"imports": IMPORT_SECONDS} | watch.seconds,
        overlapped=watch.overlapped,
        late_builds=warm.LateBuilds(strict=bool(config.compile_config and config.compile_config.strict)),
    )
    note_use(loaded)
    warm.say_what_was_loaded(found.store, compiled, loaded.startup)
    return loaded


def _attention(found: Found) -> AttentionBackend:
    """The kernels of attention; where they are built, that takes seconds."""
    return select_backend(
        found.config.attention,
        device=found.resolved.device,
        dtype=found.resolved.dtype,
        head_dim=found.model.head_dim,
        block_size=found.resolved.block_size,
    )


def _eos_token_ids(found: Found, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every id that ends an answer, by whichever file says so."""
    eos = {*found.model.eos_token_ids, *found.defaults.eos_token_ids}
    eos |= set(tokenizer.eos_token_ids if tokenizer else ())
    defaults = describe_defaults(found.defaults)
    logger.info("eos token ids: %s; sampling defaults of the model: %s", sorted(eos), defaults)
    return frozenset(eos)


def _find_folder(config: RuntimeConfig, store: Store, device: torch.device, progress: Progress) -> Path:
    """The checkpoint's folder; dummy weights need no more of it than its config."""
    progress("config", 0.0, str(config.model))
    folder = Path(config.model).expanduser()
    if config.load_format == "dummy" and folder.is_dir():
        return folder
    dtype = resolve_dtype(config.dtype, torch.bfloat16, device)
    if config.load_format == "dummy" and folder.is_file() and folder.suffix.lower() == ".gguf":
        return config_of_gguf(folder, store, dtype=dtype)
    return resolve_source(
        config.model,
        store=store,
        revision=config.revision,
        token=config.token,
        dtype=dtype,
        progress=progress,
        needs_tokenizer=config.tokenizer is None,
    )


def _read_configs(
    folder: Path, config: RuntimeConfig
) -> tuple[ModelConfig, ModelDefinition, GenerationDefaults]:
    model = read_model_config(folder)
    defaults = read_generation_config(folder)
    if not config.generation_defaults:  # how to sample is the caller's choice, where the model ends is not
        defaults = GenerationDefaults(eos_token_ids=defaults.eos_token_ids)
    return model, find_model(model.architecture), defaults


def _ops(config: RuntimeConfig) -> Ops:
    return EXACT_OPS if config.numerics == "exact" else FAST_OPS


def read_weights(found: Found, progress: Progress) -> LoadedWeights:
    """The weights, projections as their scheme keeps them."""
    resolved = found.resolved
    into: dict[str, Any] = {"dtype": resolved.dtype, "device": resolved.device, "scheme": resolved.scheme}
    try:
        if found.checkpoint is None:
            return dummy_weights(found.definition, found.model, seed=found.config.seed, **into)
        return load_weights(found.checkpoint, progress=progress, **into)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"the weights of {found.folder} do not fit on {resolved.device}: {error}; use a smaller dtype"
        ) from error


def with_rope_tables(found: Found, weights: LoadedWeights) -> dict[str, Tensor]:
    """Every tensor that the model's functions read, by name."""
    resolved = found.resolved
    into: dict[str, Any] = {"dtype": resolved.dtype, "device": resolved.device}
    tables = rope.rotation_tables(found.model, max_model_len=resolved.max_model_len, **into)
    return weights.by_name | tables


def parameter_table(model: ModelConfig, definition: ModelDefinition, resolved: Resolved) -> ParameterTable:
    """Shape and dtype of every tensor that the forward may read."""
    table = resolved.scheme.parameter_table(definition.parameters(model), resolved.dtype)
    wide = torch.float64 if resolved.dtype == torch.float64 else torch.float32
    rotation = rope.rotation_shapes(model, resolved.max_model_len)
    return table | {name: (shape, wide) for name, shape in rotation.items()}


def _compile(found: Found, progress: Progress) -> Compiled | None:
    """The plan, None where the caller wants the model to run eagerly."""
    config = found.config
    if config.compile_config is None:
        return None
    compiled = compile_program(
        found.program(),
        config.compile_config,
        config.numerics,
        found.store,
        require_warm=config.require_warm,
        progress=progress,
    )
    for layer in compiled.plan.layers:
        check_layer(layer, found.model.num_layers)
    return compiled


def _program(
    model: ModelConfig, definition: ModelDefinition, config: RuntimeConfig, resolved: Resolved
) -> Program:
    ops = resolved.scheme.ops(_ops(config))
    join = resolved.scheme.joiner(definition.parameters(model))

    def forward(weights: Mapping[str, Tensor], token_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        return definition.forward(model, join(weights), token_ids, positions, attend, ops)

    return Program(
        forward=forward,
        parameters=parameter_table(model, definition, resolved),
        key={"architecture": model.architecture, "num_layers": model.num_layers},  # for who reads a miss
        device=resolved.device,
    )
