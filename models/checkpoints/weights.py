"""A model's weights: read from safetensors straight into the fused tensors it uses, or invented."""

import dataclasses
import re
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.errors import LoadError
from ...common.logging import get_logger
from ...common.progress import Progress
from ..config import ModelConfig
from ..quantization.int8 import Int8Quantizer
from ..registry import ModelDefinition, ParameterSpec
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


def load_weights(
    definition: ModelDefinition,
    config: ModelConfig,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    quantizer: Int8Quantizer | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Every weight by name; a tensor without a place, or a place without a tensor, is an error.

    A quantizer of the model's parameters takes its projections, and what they became is among the result; a
    tied one is quantized beside the dense tensor that it is tied to.
    """
    files = tensor_shapes(folder)
    slots = check_tensors(definition, config, _all_shapes(files), folder)
    weights = _allocate(definition.parameters(config), dtype, device, quantizer)
    done, total = 0, sum(len(names) for names in files.values())
    for path, names in files.items():
        own = [name for name in names if name in slots and not slots[name].is_copy]
        for name, tensor in _tensors(path, own):
            _fill(weights, slots[name], _floating(name, tensor, path), quantizer)
            done += 1
            if progress is not None:
                progress("weights", done / total, path.name)
    for path, names in files.items():
        copies = {name: slots[name] for name in names if name in slots and slots[name].is_copy}
        _warn_of_ignored_copies(path, copies, weights)
    if progress is not None:
        progress("weights", 1.0, "")
    return weights


def check_checkpoint(definition: ModelDefinition, config: ModelConfig, folder: Path) -> None:
    """LoadError where a folder's tensors are not those that its config calls for; no weight is read."""
    check_tensors(definition, config, _all_shapes(tensor_shapes(folder)), folder)


def _all_shapes(files: Mapping[Path, Shapes]) -> Shapes:
    return {name: shape for shapes in files.values() for name, shape in shapes.items()}


def dummy_weights(
    definition: ModelDefinition,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    quantizer: Int8Quantizer | None = None,
) -> dict[str, Tensor]:
    """Weights as a new model would have them: norms of one, all else normal with deviation 0.02.

    A quantizer makes of them what it would make of a checkpoint's.
    """
    specs = definition.parameters(config)
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = _allocate(specs, dtype, device, quantizer)
    for name, spec in specs.items():
        if spec.tied_to:
            continue
        is_dense = weights[name].dtype == dtype
        value = weights[name] if is_dense else torch.empty(spec.shape, dtype=dtype, device=device)
        if name.endswith("norm"):
            value.fill_(1.0)
        else:
            value.normal_(0.0, 0.02, generator=generator)
        _fill(weights, Slot(name, 0, spec.shape), value, quantizer)
    return weights


def _allocate(
    specs: Mapping[str, ParameterSpec],
    dtype: torch.dtype,
    device: torch.device | str,
    quantizer: Int8Quantizer | None,
) -> dict[str, Tensor]:
    """Memory for all, in the order of the specs, tied parameters being the same tensor; scales come last."""
    quantized = quantizer.weights if quantizer is not None else {}
    own = {
        name: torch.empty(spec.shape, dtype=dtype, device=device)
        for name, spec in specs.items()
        if not spec.tied_to and name not in quantized
    } | quantized
    ordered = {name: own[name if name in own else str(spec.tied_to)] for name, spec in specs.items()}
    return {**ordered, **own}


def _fill(
    weights: Mapping[str, Tensor],
    slot: Slot,
    tensor: Tensor,
    quantizer: Int8Quantizer | None,
) -> None:
    """Put a tensor where it belongs, and where a quantized projection is tied to it."""
    if quantizer is None or slot.parameter not in quantizer.weights:
        _rows(weights, slot).copy_(tensor)
    if quantizer is not None:
        quantizer.take(slot.parameter, slot.start, tensor)


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


def _rows(weights: Mapping[str, Tensor], slot: Slot) -> Tensor:
    return weights[slot.parameter].narrow(0, slot.start, slot.shape[0])


def _warn_of_ignored_copies(path: Path, slots: Mapping[str, Slot], weights: Mapping[str, Tensor]) -> None:
    for name, tensor in _tensors(path, list(slots)):
        kept = _rows(weights, slots[name])
        if not torch.equal(_floating(name, tensor, path).to(kept.dtype), kept.cpu()):
            logger.warning(
                "%s in %s differs from the embedding it is tied to; the embedding is used", name, path.name
            )
