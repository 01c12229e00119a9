"""What "auto" and None of the settings come to, for a model on a machine."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from ...common.errors import ConfigError, UnsupportedError, shown
from ...common.logging import get_logger, log_once
from ...common.progress import Progress, say_nothing
from ...common.store import Store
from ...compiler.numerics import MAX_NUM_TOKENS
from ...compiler.torch_internals.torch_section import import_dynamo
from ...custom_ops._shared.fp8 import FP8
from ...custom_ops.all_reduce.group import current_group, current_world
from ...custom_ops.write_kv_cache.int8_rows import INT8
from ...models.checkpoints.weights import Checkpoint
from ...models.config import ModelConfig
from ...models.generation_config import GenerationDefaults
from ...models.pooling.spec import PoolingSpec
from ...models.quantization.model_schemes import ModelSchemes
from ...models.registry import ModelDefinition
from ...models.stages import stages_of
from ..config import DTYPES, RuntimeConfig
from ..scheduler.decision_log import check_decision_log
from ..worker.slabs import taken_bytes
from . import memory
from .drafting import with_drafter
from .resolved import ResolvedRuntime
from .step_time import prefill_tokens

logger = get_logger("runtime")

DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}  # prefill on Hopper copies a block at once
# A GPU works best on many tokens, but whoever is being answered waits for a step to end: see
# TOKENS_BESIDE_DECODE, not quite 100 ms of an 8B model on one H100.
DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": MAX_NUM_TOKENS}


def resolve_device(asked: str | torch.device) -> torch.device:
    """The device to run on; "auto" is the first GPU if there is one.

    Raises ConfigError for what names none, UnsupportedError for a GPU that torch does not see.
    """
    if asked == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        log_once(logger, logging.INFO, f"device: {device.type}")
        return device
    try:
        device = torch.device(asked)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"device is {shown(asked)}; wanted auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {shown(asked)}; wanted auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "device is 'cuda', but torch sees no GPU; use device='cpu' or install a CUDA build"
        )
    return device


def resolve_dtype(asked: str | torch.dtype, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of weights and cache; "auto" is the checkpoint's where the device computes in it at speed.

    Raises ConfigError for what names none.
    """
    if asked == "auto":
        dtype = checkpoint
        if device.type == "cpu" and checkpoint in (torch.float16, torch.bfloat16):
            fast = checkpoint == torch.bfloat16 and memory.cpu_multiplies_bfloat16()
            dtype = torch.bfloat16 if fast else torch.float32
        if dtype != checkpoint:
            log_once(logger, logging.INFO, f"dtype: {dtype}, since this CPU is slow in {checkpoint}")
        return dtype
    dtype_or_none = DTYPES.get(str(asked).removeprefix("torch."))
    if dtype_or_none is None:
        raise ConfigError(f"dtype is {shown(asked)}; wanted auto or one of {', '.join(DTYPES)}")
    return dtype_or_none


def resolve(
    config: RuntimeConfig,
    *,
    store: Store,
    folder: Path,
    checkpoint: Checkpoint | None,
    model: ModelConfig,
    definition: ModelDefinition,
    pooling: PoolingSpec | None,
    defaults: GenerationDefaults,
    schemes: ModelSchemes,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = say_nothing,
) -> ResolvedRuntime:
    """A model with its settings and its drafter, sized for this machine.

    Raises ConfigError for what does not fit, and for positions beyond those that the checkpoint is meant for.
    """
    if config.record is not None:
        check_decision_log(config.record)
    max_model_len = config.max_model_len or _default_len(model, pooling)
    if max_model_len > model.declared_positions:
        _check_long_context(config, model, max_model_len)
    max_num_batched_tokens = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[device.type]
    num_stages = config.pipeline_parallel
    if num_stages > 1:
        import_dynamo()
    resolved = ResolvedRuntime(
        config=config,
        store=store,
        folder=folder,
        checkpoint=checkpoint,
        model=model,
        rank=current_group().rank if model.ranks > 1 else 0,
        stages=stages_of(definition, model, num_stages) if num_stages > 1 else (),
        stage_index=current_world().rank // model.ranks,
        definition=definition,
        pooling=pooling,
        defaults=defaults,
        dtype=dtype,
        kv_cache_dtype=_cache_dtype(config, dtype, device),
        device=device,
        schemes=schemes,
        max_model_len=max_model_len,
        max_num_seqs=min(config.max_num_seqs, max_num_batched_tokens),  # each takes a token of a step
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk=config.prefill_chunk,
        max_prefill_tokens=None,
        block_size=config.block_size or DEFAULT_BLOCK_SIZE[device.type],
        num_kv_blocks=config.num_kv_blocks or 0,
        swap_bytes=0,
    )
    resolved = with_drafter(resolved, progress)
    if current_world().size == resolved.world_size:
        return _sized(resolved)
    sized = [_sized(replace(resolved, stage_index=index)) for index in range(max(1, num_stages))]
    return min(sized, key=lambda one: (one.num_kv_blocks, -_bytes_of(one)))


def _bytes_of(resolved: ResolvedRuntime) -> int:
    """What weights and cache of a stage take."""
    return memory.weight_bytes(resolved) + resolved.num_kv_blocks * memory.cache_block_bytes(resolved)


def _cache_dtype(config: RuntimeConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of stored keys and values; UnsupportedError for one that no kernel of the device reads."""
    if config.kv_cache_dtype == "int8" and device.type != "cpu":
        got = f"kv_cache_dtype is 'int8' and device {device.type}"
        raise UnsupportedError(f"{got}; wanted a cpu, or kv_cache_dtype 'fp8' or 'auto'")
    return {"fp8": FP8, "int8": INT8}.get(config.kv_cache_dtype, dtype)


def _default_len(model: ModelConfig, pooling: PoolingSpec | None) -> int:
    """Positions that the checkpoint says, of texts that it makes vectors of those that it was trained on."""
    trained = None if pooling is None else pooling.max_tokens
    most = model.max_position_embeddings
    return most if trained is None else min(most, trained)


def _sized(resolved: ResolvedRuntime) -> ResolvedRuntime:
    """The same with what follows from the machine's memory and speed."""
    config, model = resolved.config, resolved.model
    memory.check_weights_and_rope(resolved)
    if resolved.num_kv_blocks:
        memory.check_fit(resolved)
    else:
        blocks = least_of_ranks(memory.num_kv_blocks(resolved), resolved.world_size)
        resolved = replace(resolved, num_kv_blocks=blocks)
    is_cpu = resolved.device.type == "cpu"
    if is_cpu and config.max_num_batched_tokens is None and config.prefill_chunk is None:
        sizes = resolved.max_model_len, resolved.max_num_batched_tokens
        resolved = replace(resolved, max_prefill_tokens=prefill_tokens(model, resolved.dtype, *sizes))
    return replace(resolved, swap_bytes=_swap_bytes(resolved))


def least_of_ranks(number: int, ranks: int) -> int:
    """The smallest of what every rank finds, each at a moment of its own; the number where none has met."""
    world = current_world()
    if ranks == 1 or world.size != ranks:
        return number
    return int(world.all_gather(torch.tensor([number]), 0).min())


def _check_long_context(config: RuntimeConfig, model: ModelConfig, max_model_len: int) -> None:
    """ConfigError for more positions than the checkpoint is meant for, unless the caller allows it."""
    declared = f"the checkpoint is meant for {model.declared_positions} positions"
    if not config.allow_long_context:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {declared} (rope_type {model.rope.rope_type!r}); wanted "
            "at most that, or allow_long_context=True to have answers of unknown quality beyond it"
        )
    logger.warning("max_model_len is %d, but %s: answers beyond may be of no use", max_model_len, declared)


def _swap_bytes(resolved: ResolvedRuntime) -> int:
    """What was asked for, if it can be had; else what memory allows on a GPU, and nothing on a CPU."""
    config, model = resolved.config, resolved.model
    asked, block = config.swap_bytes, memory.cache_block_bytes(resolved)
    if asked == 0 or not config.prefix_cache or (asked is None and resolved.device.type == "cpu"):
        return 0
    if memory.layer_groups(model) != (memory.LayerGroup(window=None, layers=tuple(range(model.num_layers))),):
        reason = "layers of this model see a window, and blocks that leave it are given back before"
        if asked is not None:
            raise UnsupportedError(f"swap_bytes is {asked}, but {reason}; wanted 0 or None")
        log_once(logger, logging.INFO, f"swap_bytes: 0, since {reason}")
        return 0
    if asked is None:
        return memory.default_swap_bytes(resolved)
    least = taken_bytes(block, is_pinned=resolved.device.type == "cuda")
    if asked < least:
        raise ConfigError(f"swap_bytes is {asked}; wanted 0 or at least {least}, for a block of every layer")
    if asked > (most := memory.available_bytes(torch.device("cpu"))):
        raise ConfigError(f"swap_bytes is {asked}; wanted at most {most}, what the host has to spare")
    return asked
