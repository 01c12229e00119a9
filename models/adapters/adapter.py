"""An adapter in memory: for each projection the two matrices that lamina::lora takes, and factors."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from ...common.errors import LoadError, UnsupportedError
from ...common.patterns import shared_steps
from ..checkpoints.shards import listed
from ..fields import whole_file
from ..quantization.model_schemes import ModelSchemes
from ..registry import ParameterSpec
from .peft_config import CONFIG_NAME, PeftConfig, read_peft_config

WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = (".lora_A.weight", ".lora_B.weight")


class AdaptedProjection(NamedTuple):
    """What an adapter adds to one projection; fused ones have a part for each module."""

    a: Tensor  # [parts * rank, in]
    b: Tensor  # [out, rank]
    scales: Tensor  # [parts] float32; 0 of a part that it leaves as it is


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter as a model's projections take it, every matrix padded by zeros to one rank."""

    digest: str  # of the bytes of its files
    rank: int  # the largest of a module
    modules: tuple[str, ...]  # that it changes, as the checkpoint calls them
    projections: Mapping[str, AdaptedProjection]  # by the model's parameter

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return sum(tensor.nbytes for one in self.projections.values() for tensor in one)


def adaptable(specs: Mapping[str, ParameterSpec]) -> dict[str, ParameterSpec]:
    """The projections that an adapter may change: all but the LM head, which is no part of a plan."""
    return {name: spec for name, spec in specs.items() if spec.projection and name != "lm_head"}


@shared_steps()
def read_adapter(
    folder: Path, specs: Mapping[str, ParameterSpec], *, max_rank: int, dtype: torch.dtype
) -> Adapter:
    """The adapter of a folder that PEFT wrote, for a model with these parameters; rounded to the dtype.

    Raises LoadError for files that are missing, damaged or do not fit the model, ConfigError for a value
    that its config cannot have, and UnsupportedError, by its name, for what is not served.
    """
    config, given, digest = _read(folder)
    modules = {_module(source): (name, part) for name, part, source in _sources(adaptable(specs))}
    pairs = _pairs(given, folder / WEIGHTS_NAME)
    _check_modules(config, pairs, modules, folder)
    rank = max(config.rank_of(module) for module in pairs)
    if rank > max_rank:
        raise UnsupportedError(
            f"{folder} has matrices of rank {rank}, and max_lora_rank is {max_rank}; start with "
            f"LoRAConfig(max_lora_rank={rank})"
        )
    projections: dict[str, AdaptedProjection] = {}
    for module, pair in pairs.items():
        name, part = modules[module]
        spec = specs[name]
        if name not in projections:
            projections[name] = _nothing_added(spec, max_rank, dtype)
        _check_shapes(module, pair, config.rank_of(module), spec.source_rows[part], spec.shape[1], folder)
        _fill(projections[name], spec, part, pair, config.scale_of(module))
    return Adapter(digest=digest, rank=rank, modules=tuple(sorted(pairs)), projections=projections)


def share_of(adapter: Adapter, schemes: ModelSchemes, rank: int) -> Adapter:
    """What one of several ranks has of an adapter of the whole model: itself where there is one.

    Of a projection whose rows ranks share out, all of a and its rows of b; where they share out columns,
    those of a and all of b: what a rank adds to its part of the sum is its part of what the adapter adds.
    """
    if schemes.sharding is None:
        return adapter
    own = {
        name: _share(one, schemes, name, rank)
        for name, one in adapter.projections.items()
        if name in schemes.specs  # else it is another stage's
    }
    return replace(adapter, projections=own)


def _share(whole: AdaptedProjection, schemes: ModelSchemes, name: str, rank: int) -> AdaptedProjection:
    runs = schemes.runs_of(name, rank)
    b = whole.b.new_zeros(schemes.specs[name].shape[0], whole.b.shape[1])
    for run, _ in runs:
        b[run.to : run.to + run.num_rows] = whole.b[run.start : run.start + run.num_rows]
    columns = runs[0][1]
    a = whole.a if columns is None else whole.a.narrow(1, *columns).clone()
    return AdaptedProjection(a=a, b=b, scales=whole.scales)


def _read(folder: Path) -> tuple[PeftConfig, Mapping[str, Tensor], str]:
    """The config, the tensors, and the hash of both files."""
    from safetensors.torch import load as load_tensors  # of no use to who has no adapters

    if not folder.is_dir():
        raise LoadError(f"{folder} is no folder; wanted one with {CONFIG_NAME} and {WEIGHTS_NAME}")
    config = read_peft_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise LoadError(f"{folder} has adapter_model.bin alone; save it again with safe_serialization=True")
    contents = [whole_file(one).read_bytes() for one in (folder / CONFIG_NAME, path)]
    hashes = [hashlib.sha256(content).digest() for content in contents]
    try:
        tensors = load_tensors(contents[1])
    except (SafetensorError, ValueError, KeyError) as error:
        raise LoadError(f"{path} is damaged: {error}; download it again") from error
    return config, tensors, hashlib.sha256(b"".join(hashes)).hexdigest()


def _sources(specs: Mapping[str, ParameterSpec]) -> Iterator[tuple[str, int, str]]:
    for name, spec in specs.items():
        for part, source in enumerate(spec.sources):
            yield name, part, source


def _module(source: str) -> str:
    return source.removesuffix(".weight")


def _pairs(given: Mapping[str, Tensor], path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Both matrices of each module, by the module's name."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in given.items():
        end = next((end for end in ENDS if name.endswith(end)), None)
        if end is None or not name.startswith(PREFIX):
            kind = "embeddings" if "lora_embedding" in name else "what no linear module of LoRA has"
            raise UnsupportedError(f"{path} has {name}, {kind}; wanted {PREFIX}…{ENDS[0]} and {ENDS[1]}")
        found.setdefault(name.removeprefix(PREFIX).removesuffix(end), {})[end] = tensor
    for module, both in found.items():
        if len(both) < len(ENDS):
            raise LoadError(f"{path} has one matrix of {module}; wanted lora_A and lora_B")
    return {module: (both[ENDS[0]], both[ENDS[1]]) for module, both in found.items()}


def _check_modules(
    config: PeftConfig, pairs: Mapping[str, object], modules: Mapping[str, object], folder: Path
) -> None:
    """Exactly what the config names is there, and the model has it: else it would not compute what it did."""
    unknown = sorted(pairs.keys() - modules.keys())
    if unknown:
        raise LoadError(
            f"{folder} has matrices of {listed(unknown)}, which this model has not, or not to be adapted; "
            f"wanted modules such as {', '.join(list(modules)[:3])}"
        )
    targeted = set(config.targeted(modules))
    missing, beyond = sorted(targeted - pairs.keys()), sorted(pairs.keys() - targeted)
    if missing:
        raise LoadError(f"{folder} lacks matrices of {listed(missing)}, which its {CONFIG_NAME} names")
    if beyond:
        raise LoadError(f"{folder} has matrices of {listed(beyond)}, which its {CONFIG_NAME} does not name")
    if not pairs:
        raise LoadError(f"{folder} changes no module of this model: target_modules names none of them")


def _check_shapes(
    module: str, pair: Sequence[Tensor], rank: int, rows: int, columns: int, folder: Path
) -> None:
    got, wanted = [tuple(tensor.shape) for tensor in pair], [(rank, columns), (rows, rank)]
    if got != wanted:
        shapes = [" and ".join(str(list(shape)) for shape in both) for both in (got, wanted)]
        raise LoadError(f"{folder} has matrices of {shapes[0]} for {module}; wanted {shapes[1]}")
    if not all(tensor.is_floating_point() for tensor in pair):
        raise UnsupportedError(
            f"{folder} has matrices of {pair[0].dtype} for {module}; wanted floating point"
        )


def _nothing_added(spec: ParameterSpec, rank: int, dtype: torch.dtype) -> AdaptedProjection:
    num_parts = len(spec.source_rows)
    return AdaptedProjection(
        a=torch.zeros(num_parts * rank, spec.shape[1], dtype=dtype),
        b=torch.zeros(spec.shape[0], rank, dtype=dtype),
        scales=torch.zeros(num_parts),
    )


def _fill(
    projection: AdaptedProjection, spec: ParameterSpec, part: int, pair: Sequence[Tensor], scale: float
) -> None:
    """The matrices of one module where its part has them."""
    (a, b), max_rank = pair, projection.b.shape[1]
    projection.a[part * max_rank : part * max_rank + len(a)].copy_(a)
    first = sum(spec.source_rows[:part])
    projection.b[first : first + len(b), : b.shape[1]].copy_(b)
    projection.scales[part] = scale
