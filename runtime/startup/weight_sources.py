"""Where weights come from: the checkpoint that a runtime was made of, or another of the same model."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from ...common.errors import ConfigError, UnsupportedError
from ...common.progress import say_nothing
from ...models.checkpoints.loaded_weights import LoadedWeights
from ...models.checkpoints.quantized.modules import names_of_tensors, names_replaced
from ...models.checkpoints.weights import dummy_weights, load_weights, read_checkpoint
from ...models.config import ModelConfig, read_model_config
from ...models.sharding import config_of_rank, sharding_of
from ..worker.model_weights import WeightSource
from .resolved import ResolvedRuntime
from .schemes import resolve_schemes

FREE = ("dtype", "bos_token_id", "eos_token_ids")  # of a config: what does not decide how weights are used
FindFolder = Callable[[Path | str], Path]


def source_of(resolved: ResolvedRuntime) -> WeightSource:
    """The source that a runtime's weights are read from when it is loaded."""
    checkpoint = resolved.checkpoint
    if checkpoint is None:
        return WeightSource(digest="dummy", read=partial(_make_up, resolved))
    modules = [*checkpoint.modules.values()]
    return WeightSource(
        folder=resolved.folder,
        read=partial(_read, resolved),
        quantized=frozenset(names_of_tensors(modules) | names_replaced(modules)),
    )


def another_source(resolved: ResolvedRuntime, folder: Path) -> WeightSource:
    """A checkpoint for the same runtime, with other weights; of them none is read so far.

    Raises ConfigError where its config calls for another model, UnsupportedError where its projections are
    kept otherwise, LoadError for files that are missing or damaged.
    """
    model, ranks = read_model_config(folder), resolved.model.ranks
    if differing := _differing(config_of_rank(model, ranks), resolved.model):
        raise ConfigError(
            f"{folder} is another model, by {', '.join(differing)} of its config.json; wanted one that "
            "differs in its weights alone"
        )
    checkpoint = read_checkpoint(resolved.definition, model, folder)
    schemes = resolve_schemes(resolved.config.quantization, folder, checkpoint.specs)
    if ranks > 1:
        schemes = schemes.of_rank(sharding_of(resolved.definition, model, ranks))
    if schemes.facts() != resolved.schemes.facts():
        raise UnsupportedError(
            f"projections of {folder} are kept as {schemes.name}, and those of this runtime as "
            f"{resolved.schemes.name}; wanted a checkpoint of the same format"
        )
    return source_of(replace(resolved, checkpoint=checkpoint, folder=folder))


def _read(resolved: ResolvedRuntime, weights: LoadedWeights) -> None:
    assert resolved.checkpoint is not None
    scales = weights.kv_scales
    load_weights(
        resolved.checkpoint,
        dtype=resolved.dtype,
        device=resolved.device,
        schemes=resolved.own_schemes,
        rank=resolved.rank,
        progress=say_nothing,
        into=weights,
    )
    if scales.keys() != weights.kv_scales.keys() or any(
        not bool((weights.kv_scales[name] == scale).all()) for name, scale in scales.items()
    ):
        raise UnsupportedError(
            f"{resolved.folder} has other scales of the KV cache than this runtime was made of; make another"
        )


def _make_up(resolved: ResolvedRuntime, weights: LoadedWeights) -> None:
    dummy_weights(
        resolved.definition,
        resolved.model,
        dtype=resolved.dtype,
        device=resolved.device,
        seed=resolved.config.seed,
        schemes=resolved.own_schemes,
        rank=resolved.rank,
        into=weights,
    )


def _differing(one: ModelConfig, other: ModelConfig) -> list[str]:
    names = [each.name for each in fields(ModelConfig) if each.name not in FREE]
    return [name for name in names if getattr(one, name) != getattr(other, name)]
