"""A model's weights: read from safetensors straight into the fused tensors it uses, or invented."""

import dataclasses
import re
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.errors import LoadError
from ...common.logging import get_logger
from ...common.progress import Progress, say_nothing
from ..config import ModelConfig
from ..quantization.model_schemes import ModelSchemes
from ..registry import ModelDefinition, ParameterSpec
from .loaded_weights import LoadedWeights
from .shards import Shapes, listed, opened, tensor_shapes

logger = get_logger("models.weights")

# Buffers of old checkpoints that follow from the config.
DERIVED_TENSORS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
# The pages of a mapped file count as our memory until it is closed, so it is opened anew after this much.
MAPPED_BYTES = 1 << 26


class Slot(NamedTuple):
    """Where a checkpoint tensor belongs: `shape[0]` rows of a parameter from `start` onward."""

    parameter: str
    start: int
    shape: tuple[int, ...]
    is_copy: bool = False  # of a parameter that other tensors fill


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A folder whose tensors are those that its config calls for: where each lies, and where it belongs."""

    specs: Mapping[str, ParameterSpec]
    files: Mapping[Path, Shapes]
    slots: Mapping[str, Slot]


def read_checkpoint(definition: ModelDefinition, config: ModelConfig, folder: Path) -> Checkpoint:
    """What the headers of a folder's files say; no weight is read.

    Raises LoadError for a tensor without a place, a place without a tensor, or a shape that the config does
    not call for.
    """
    files = tensor_shapes(folder)
    shapes = {name: shape for held in files.values() for name, shape in held.items()}
    slots = check_tensors(definition, config, shapes, folder)
    return Checkpoint(specs=definition.parameters(config), files=files, slots=slots)


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    schemes: ModelSchemes | None = None,
    progress: Progress = say_nothing,
) -> LoadedWeights:
    """Every weight of a checkpoint, projections as their schemes keep them; None: as the checkpoint does.

    Raises LoadError for a file that is damaged, or holds something else than its header said.
    """
    schemes = schemes or ModelSchemes(specs=checkpoint.specs)
    weights = LoadedWeights(schemes, dtype=dtype, device=device)
    files, slots = checkpoint.files, checkpoint.slots
    done, total = 0, sum(len(names) for names in files.values())
    for path, names in files.items():
        own = [name for name in names if name in slots and not slots[name].is_copy]
        for name, tensor in _tensors(path, own):
            slot = slots[name]
            weights.take(slot.parameter, slot.start, _floating(name, tensor, path))
            done += 1
            progress("weights", done / total, path.name)
    for path, names in files.items():
        copies = {name: slots[name] for name in names if name in slots and slots[name].is_copy}
        _warn_of_ignored_copies(path, copies, weights)
    progress("weights", 1.0, "")
    return weights


def dummy_weights(
    definition: ModelDefinition,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    schemes: ModelSchemes | None = None,
) -> LoadedWeights:
    """Weights as a new model would have them: norms of one, all else normal with deviation 0.02.

    Schemes make of them what they would make of a checkpoint's.
    """
    schemes = schemes or ModelSchemes(specs=definition.parameters(config))
    weights = LoadedWeights(schemes, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, spec in weights.specs.items():
        if not spec.tied_to:
            value = weights.room(name)
            if name.endswith("norm"):
                value.fill_(1.0)
            else:
                value.normal_(0.0, 0.02, generator=generator)
            weights.take(name, 0, value)
    return weights


def _slots(specs: Mapping[str, ParameterSpec]) -> dict[str, Slot]:
    slots: dict[str, Slot] = {}
    for parameter, spec in specs.items():
        start = 0
        for source, shape in spec.source_shapes.items():
            slots[source] = Slot(spec.tied_to or parameter, start, shape, is_copy=spec.tied_to is not None)
            start += shape[0]
    return slots


def check_tensors(
    definition: ModelDefinition, config: ModelConfig, shapes: Shapes, origin: Path
) -> dict[str, Slot]:
    """Where each tensor of a checkpoint belongs, by name; LoadError for one without a place, a place without
    one, or a shape that the config does not call for.

    A checkpoint may hold the tied name of a parameter alone.
    """
    specs = definition.parameters(config)
    slots = _held_ties(specs, _slots(specs), shapes)
    unknown = sorted(name for name in shapes.keys() - slots.keys() if not DERIVED_TENSORS.fullmatch(name))
    if unknown:
        raise LoadError(f"{origin} holds tensors that its config gives no place: {listed(unknown)}")
    missing = [name for name, slot in slots.items() if name not in shapes and not slot.is_copy]
    if missing:
        hint = _hint_of_ties(definition, config, missing)
        raise LoadError(f"{origin} lacks tensors that its config calls for: {listed(missing)}{hint}")
    for name in slots.keys() & shapes.keys():
        if shapes[name] != slots[name].shape:
            got, wanted = list(shapes[name]), list(slots[name].shape)
            raise LoadError(f"{name} in {origin} has shape {got}; its config calls for {wanted}")
    return slots


def _held_ties(
    specs: Mapping[str, ParameterSpec], slots: dict[str, Slot], held: Container[str]
) -> dict[str, Slot]:
    """The slots, where a tied name that the checkpoint holds alone fills the parameter itself."""
    for spec in specs.values():
        if spec.tied_to is None or not all(name in held for name in spec.sources):
            continue
        own = specs[spec.tied_to].sources
        if not any(name in held for name in own):
            filled = {name: slots[name]._replace(is_copy=False) for name in spec.sources}
            slots = {name: slot for name, slot in slots.items() if name not in own} | filled
    return slots


def _hint_of_ties(definition: ModelDefinition, config: ModelConfig, missing: Sequence[str]) -> str:
    """What to say where all that is missing would be tied if the config said so."""
    tied = definition.parameters(dataclasses.replace(config, tie_word_embeddings=True)).values()
    copies = {name for spec in tied if spec.tied_to for name in spec.sources}
    if not copies.issuperset(missing):
        return ""
    return '; if its embedding serves for them, config.json should say "tie_word_embeddings": true'


def _tensors(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a file, as views of it."""
    left = deque(names)
    while left:
        mapped = 0
        with opened(path) as file:
            while left and mapped < MAPPED_BYTES:
                tensor = file.get_tensor(left[0])
                mapped += tensor.nbytes
                yield left.popleft(), tensor


def _floating(name: str, tensor: Tensor, path: Path) -> Tensor:
    if not tensor.is_floating_point():
        raise LoadError(
            f"{name} in {path} has dtype {tensor.dtype}; wanted floating point, quantized files are not read"
        )
    return tensor


def _warn_of_ignored_copies(path: Path, slots: Mapping[str, Slot], weights: LoadedWeights) -> None:
    for name, tensor in _tensors(path, list(slots)):
        slot = slots[name]
        kept = weights.rows(slot.parameter, slot.start, slot.shape[0])
        if not torch.equal(_floating(name, tensor, path).to(kept.dtype), kept.cpu()):
            logger.warning(
                "%s in %s differs from the embedding it is tied to; the embedding is used", name, path.name
            )
