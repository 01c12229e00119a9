"""A checkpoint about to be quantized: which tensors are projections, and what becomes of the others."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.errors import ConfigError, LoadError, UnsupportedError, shown
from ..checkpoints.shards import opened
from ..checkpoints.weights import read_checkpoint
from ..config import DTYPES, ModelConfig, read_model_config
from ..fields import read_json
from ..registry import ModelDefinition, ParameterSpec, find_model
from .recipe import Recipe, fitting_group_sizes

CHUNK_ELEMENTS = 1 << 22  # of a tensor that are in memory at once
ROWS_AT_ONCE = 8  # chunks begin at a multiple of it, since zero points of so many rows share a word
HEAD = "lm_head"  # by its module's name: what it multiplies by decides which token is likeliest
WEIGHT = ".weight"
CONFIG_NAME = "config.json"
OTHER_CONFIGS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
SAFETENSORS_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, read some rows at a time."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """All of it."""
        with opened(self.path) as file:
            return file.get_tensor(self.name).clone()  # type: ignore[no-any-return]

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """The number of the first row, and rows from it on: few million elements at a time.

        The file is opened for each, since pages of a mapped file count as memory until it is closed.
        """
        if len(self.shape) != 2:
            yield 0, self.read()
            return
        step = max(1, CHUNK_ELEMENTS // max(1, self.shape[1]) // ROWS_AT_ONCE) * ROWS_AT_ONCE
        for first in range(0, self.shape[0], step):
            with opened(self.path) as file:
                yield first, file.get_slice(self.name)[first : first + step].clone()


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A projection as a checkpoint names it, and the parameter of the model that it is part of, or all of."""

    name: str
    parameter: str
    weight: StoredTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceModel:
    """A model's files, sorted: projections to be quantized, and tensors that are copied."""

    folder: Path
    recipe: Recipe  # with a group size that fits these modules
    config: Mapping[str, Any]  # the content of config.json
    model: ModelConfig
    definition: ModelDefinition
    specs: Mapping[str, ParameterSpec]
    tensors: Mapping[str, StoredTensor]  # all of them, by name
    modules: tuple[Module, ...]
    ignored: tuple[str, ...]  # names of projections that stay as they are

    @property
    def copied(self) -> tuple[StoredTensor, ...]:
        """The tensors that stay as they are."""
        quantized = {module.weight.name for module in self.modules}
        return tuple(tensor for name, tensor in self.tensors.items() if name not in quantized)


def read_source(folder: Path, recipe: Recipe) -> SourceModel:
    """What a recipe makes of a folder's tensors; no weight is read.

    Raises UnsupportedError for a model that is quantized already, ConfigError for a recipe that does not fit
    its projections, and what reading a checkpoint raises.
    """
    raw = read_json(folder / CONFIG_NAME)
    _refuse_quantized(folder, raw)
    model = read_model_config(folder)
    definition = find_model(model.architecture)
    checkpoint = read_checkpoint(definition, model, folder)
    stored = (_stored(path, name) for path, names in checkpoint.files.items() for name in names)
    tensors = {tensor.name: tensor for tensor in stored if tensor.name in checkpoint.slots}
    projections = _projections(checkpoint.specs, tensors)
    recipe.check_patterns([*(module.name for module in projections), HEAD])  # which a tied model lacks
    modules = tuple(module for module in projections if not _stays(module.name, recipe))
    _check_fused(projections, {module.name for module in modules})
    return SourceModel(
        folder=folder,
        recipe=_fitted(recipe, modules),
        config=raw,
        model=model,
        definition=definition,
        specs=checkpoint.specs,
        tensors=tensors,
        modules=modules,
        ignored=tuple(dict.fromkeys([HEAD, *(m.name for m in projections if m not in modules)])),
    )


def _refuse_quantized(folder: Path, raw: Mapping[str, Any]) -> None:
    named = raw.get("quantization_config") or raw.get("compression_config")
    others = [name for name in OTHER_CONFIGS if (folder / name).is_file()]
    if not named and not others:
        return
    how = named.get("quant_method", "unknown") if isinstance(named, Mapping) else "unknown"
    where = f"config.json: quant_method {shown(how)}" if named else others[0]
    raise UnsupportedError(
        f"{folder} is quantized already ({where}), and its errors would come on top; give the original model"
    )


def _stored(path: Path, name: str) -> StoredTensor:
    with opened(path) as file:
        facts = file.get_slice(name)
        kind, shape = facts.get_dtype(), tuple(facts.get_shape())
    if kind not in SAFETENSORS_DTYPES:
        raise LoadError(f"{name} in {path} has dtype {kind}; wanted one of {', '.join(DTYPES)} to quantize")
    return StoredTensor(name=name, path=path, shape=shape, dtype=SAFETENSORS_DTYPES[kind])


def _projections(
    specs: Mapping[str, ParameterSpec], tensors: Mapping[str, StoredTensor]
) -> tuple[Module, ...]:
    """The projections that the checkpoint has tensors of their own for, in the model's order."""
    return tuple(
        Module(name=_module_name(source), parameter=parameter, weight=tensors[source])
        for parameter, spec in specs.items()
        if spec.projection
        for source in spec.sources
        if source in tensors
    )


def _module_name(source: str) -> str:
    if not source.endswith(WEIGHT):
        raise UnsupportedError(
            f"the projection {shown(source)} does not end in {WEIGHT!r}, so that no format has names for its "
            "scales; rename the tensor"
        )
    return source.removesuffix(WEIGHT)


def _stays(name: str, recipe: Recipe) -> bool:
    return name.rpartition(".")[2] == HEAD or recipe.ignores(name)


def _check_fused(projections: tuple[Module, ...], quantized: set[str]) -> None:
    """Refuse to quantize some of the projections that are multiplied as one, and leave others."""
    by_parameter: dict[str, list[str]] = {}
    for module in projections:
        by_parameter.setdefault(module.parameter, []).append(module.name)
    for names in by_parameter.values():
        kept = [name for name in names if name not in quantized]
        if kept and len(kept) < len(names):
            raise ConfigError(
                f"ignore leaves {', '.join(kept)} of {', '.join(names)} as it is, but they are multiplied "
                "as one, and no program reads half of them; ignore all of them, or none"
            )


def _fitted(recipe: Recipe, modules: tuple[Module, ...]) -> Recipe:
    """The recipe for these modules. ConfigError where there are none, or groups do not divide columns."""
    if not modules:
        raise ConfigError("ignore leaves every projection as it is; wanted some to quantize")
    recipe = recipe.fitted(module.weight.shape[1] for module in modules)
    group = recipe.columns
    for module in modules:
        columns = module.weight.shape[1]
        if group and columns % group:
            fitting = fitting_group_sizes(m.weight.shape[1] for m in modules)
            others = [f"group_size={size}" for size in (*fitting, -1)]
            raise ConfigError(
                f"group_size is {group}, which does not divide the {columns} columns of {module.name}; "
                f"use {' or '.join(others)}, or ignore the module"
            )
    return recipe
