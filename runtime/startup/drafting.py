"""The model or head that drafts for a model: found, checked against it, and resolved as that is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ...common.errors import ConfigError, UnsupportedError, shown
from ...common.progress import Progress
from ...models.checkpoints.source import resolve_source
from ...models.checkpoints.weights import read_checkpoint
from ...models.config import ModelConfig, read_model_config
from ...models.heads.checkpoint import Head, has_head, read_head
from ...models.heads.definition import HeadDefinition, check_head, head_config
from ...models.quantization.model_schemes import ModelSchemes
from ...models.quantization.scheme import TensorTable
from ...models.registry import ModelDefinition, find_model
from ...models.sharding import config_of_rank, sharding_of
from ...models.stages import with_last_reading
from ..speculation.config import Draft, Eagle
from ..tokenization.tokenizer import Tokenizer, load_tokenizer
from .resolved import ResolvedRuntime
from .schemes import resolve_schemes


def refuse_head(definition: ModelDefinition, folder: Path) -> None:
    """Raise ConfigError for a head in the place of a model."""
    if isinstance(definition, HeadDefinition):
        raise ConfigError(
            f"{folder} is a head that drafts for another model; give it as speculative=Eagle(model) to that "
            "model's runtime"
        )


def with_drafter(resolved: ResolvedRuntime, progress: Progress) -> ResolvedRuntime:
    """The same with the model that drafts for it, if any; no weights are read.

    Raises ConfigError for a drafter that does not fit, LoadError for files of it that are missing or damaged.
    """
    speculative = resolved.config.speculative
    if not isinstance(speculative, (Draft, Eagle)):
        return resolved
    folder = _find_folder(resolved, speculative.model, progress)
    changes: dict[str, Any] = {"speculative": None, "revision": None, "pipeline_parallel": 1}
    config = replace(resolved.config, model=speculative.model, **changes)
    drafter = replace(resolved, config=config, folder=folder, stages=(), stage_index=0)
    if isinstance(speculative, Draft):  # which every rank has for itself
        drafter = replace(drafter, config=replace(config, tensor_parallel=1), rank=0)
        return replace(resolved, drafter=_draft_model(drafter, resolved))
    head = _head(drafter, resolved)
    assert isinstance(head.definition, HeadDefinition)
    residuals = head.definition.layers_read(head.model, resolved.model)
    stages = with_last_reading(resolved.stages, ["embedding"] if head.borrowed else [])
    return replace(resolved, drafter=head, residuals=residuals, stages=stages)


def _find_folder(resolved: ResolvedRuntime, model: str | Path, progress: Progress) -> Path:
    progress("config", 0.0, str(model))
    folder = Path(model).expanduser()
    if resolved.config.load_format == "dummy" and folder.is_dir():
        return folder
    return resolve_source(
        model,
        store=resolved.store,
        token=resolved.config.token,
        dtype=resolved.dtype,
        progress=progress,
        needs_tokenizer=False,
    )


def _head(drafter: ResolvedRuntime, target: ResolvedRuntime) -> ResolvedRuntime:
    head = read_head(drafter.folder, is_dummy=target.config.load_format == "dummy")
    check_head(head.config, head.definition, target.model)
    borrowed: TensorTable = {}
    if not head_config(head.config).has_embedding:
        table = target.schemes.parameter_table(target.dtype)
        borrowed = {name: table[name] for name in target.schemes.table_parts("embedding")}
    model, schemes = _of_rank(head, target.model.ranks)
    return replace(
        drafter,
        checkpoint=head.checkpoint,
        model=model,
        definition=head.definition,
        schemes=schemes,
        borrowed=borrowed,
    )


def _of_rank(head: Head, ranks: int) -> tuple[ModelConfig, ModelSchemes]:
    """The part of a head that a rank of its target has; UnsupportedError where it cannot be shared out."""
    schemes = ModelSchemes(specs=head.definition.parameters(head.config))
    if ranks == 1:
        return head.config, schemes
    try:
        sharding = sharding_of(head.definition, head.config, ranks)
        return config_of_rank(head.config, ranks), schemes.of_rank(sharding)
    except UnsupportedError as error:
        raise UnsupportedError(f"the head cannot be shared out: {error}") from error


def _draft_model(drafter: ResolvedRuntime, target: ResolvedRuntime) -> ResolvedRuntime:
    folder, is_dummy = drafter.folder, target.config.load_format == "dummy"
    if not is_dummy and has_head(folder):
        raise ConfigError(f"{folder} is a head and no model of its own; wanted speculative=Eagle(model)")
    model = read_model_config(folder)
    definition = find_model(model.architecture)
    refuse_head(definition, folder)
    checkpoint = None if is_dummy else read_checkpoint(definition, model, folder)
    schemes = resolve_schemes(None, folder, definition.parameters(model))
    schemes.check(target.device)
    return replace(drafter, checkpoint=checkpoint, model=model, definition=definition, schemes=schemes)


def check_vocabulary(resolved: ResolvedRuntime, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError where a draft model has other tokens than the model whose tokenizer this is.

    Vocabularies that are padded to other sizes are the same; where there are no tokenizers sizes decide.
    """
    drafter = resolved.drafter
    if drafter is None or isinstance(drafter.definition, HeadDefinition):
        return
    own = load_tokenizer(drafter.folder) if tokenizer is not None else None
    sizes = drafter.model.vocab_size, resolved.model.vocab_size
    if own is None or tokenizer is None:
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the draft model {drafter.folder} has a vocabulary of {sizes[0]} and the model one of "
                f"{sizes[1]}; wanted a draft model with the same tokens"
            )
        return
    size = max(tokenizer.size, own.size)
    theirs, ours = tokenizer.names_of(range(size)), own.names_of(range(size))
    differing = next((number for number in range(size) if theirs[number] != ours[number]), None)
    if differing is not None:
        raise ConfigError(
            f"the draft model {drafter.folder} has another tokenizer: token {differing} is "
            f"{shown(ours[differing])} there and {shown(theirs[differing])} in the model; wanted a draft "
            "model with the same tokens"
        )
