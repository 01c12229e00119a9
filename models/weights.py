"""A model's weights: read from safetensors straight into the fused tensors it uses, or invented."""

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..common.errors import LoadError
from ..common.logging import get_logger
from ..common.progress import Progress
from .config import ModelConfig
from .fields import read_json
from .quantization import Int8Quantizer
from .registry import ModelDefinition, ParameterSpec

logger = get_logger("models.weights")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Buffers of old checkpoints that follow from the config.
DERIVED_TENSORS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
# The pages of a mapped file count as our memory until it is closed, so it is opened anew after this much.
MAPPED_BYTES = 1 << 26


class Slot(NamedTuple):
    """Where a checkpoint tensor belongs: `shape[0]` rows of a parameter from `start` onward."""

    parameter: str
    start: int
    shape: tuple[int, ...]


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
    specs = definition.parameters(config)
    files = _locate(folder)
    slots = _slots(specs)
    _check_names(specs, slots, files, folder)
    weights = _allocate(specs, dtype, device, quantizer)
    untied = {name: slot for name, slot in slots.items() if specs[slot.parameter].tied_to is None}
    done, total = 0, sum(len(names) for names in files.values())
    for path, names in files.items():
        for name, tensor in _tensors(path, [name for name in names if name in untied]):
            _fill(weights, _checked(slots[name], name, tensor, path), tensor, quantizer)
            done += 1
            if progress is not None:
                progress("weights", done / total, path.name)
    for path, names in files.items():
        copies = {name: slots[name] for name in names if name in slots and name not in untied}
        kept = {
            name: slot._replace(parameter=str(specs[slot.parameter].tied_to)) for name, slot in copies.items()
        }
        _warn_of_ignored_copies(path, kept, weights)
    if progress is not None:
        progress("weights", 1.0, "")
    return weights


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
            slots[source] = Slot(parameter, start, shape)
            start += shape[0]
    return slots


def _locate(folder: Path) -> dict[Path, list[str]]:
    """The checkpoint's files with the names of their tensors: those of the index, else the single file."""
    index = folder / INDEX_NAME
    if not index.exists():
        if not (folder / SINGLE_NAME).exists():
            raise LoadError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; {other_weights(folder)}")
        return {folder / SINGLE_NAME: _names(folder / SINGLE_NAME)}
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard for shard in placed.values()
    ):
        raise LoadError(
            f"{index} has no weight_map from tensor names to file names beside it; download it again"
        )
    missing = sorted({shard for shard in placed.values() if not os.path.exists(folder / shard)})
    if missing:
        raise LoadError(
            f"incomplete download: {', '.join(missing)} named by {index} not found; download the model again"
        )
    files = {folder / shard: _names(folder / shard) for shard in sorted(set(placed.values()))}
    held = {(name, path.name) for path, names in files.items() for name in names}
    misplaced = [f"{name} in {shard}" for name, shard in placed.items() if (name, shard) not in held]
    misplaced += [f"{name} not in {shard}" for name, shard in held - set(placed.items())]
    if misplaced:
        raise LoadError(f"{index} and its files differ: {_listed(misplaced)}")
    return files


def other_weights(folder: Path) -> str:
    """What to do about a folder without safetensors, going by what else it holds."""
    found = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern))
    if any(name.endswith(".gguf") for name in found):
        return f"pass the GGUF file itself ({found[-1]})"
    return f"convert {found[0]} to safetensors" if found else "download the model again"


def _check_names(
    specs: Mapping[str, ParameterSpec],
    slots: Mapping[str, Slot],
    files: Mapping[Path, list[str]],
    folder: Path,
) -> None:
    held = {name for names in files.values() for name in names}
    unknown = sorted(name for name in held - slots.keys() if not DERIVED_TENSORS.fullmatch(name))
    if unknown:
        raise LoadError(f"{folder} holds tensors that config.json gives no place: {_listed(unknown)}")
    missing = [
        name for name, slot in slots.items() if name not in held and specs[slot.parameter].tied_to is None
    ]
    if missing:
        raise LoadError(f"{folder} lacks tensors that config.json calls for: {_listed(missing)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is damaged or cut short: {error}; download it again") from error


def _names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.offset_keys())


def _tensors(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a file, as views of it."""
    left = deque(names)
    while left:
        mapped = 0
        with _opened(path) as file:
            while left and mapped < MAPPED_BYTES:
                tensor = file.get_tensor(left[0])
                mapped += tensor.nbytes
                yield left.popleft(), tensor


def _checked(slot: Slot, name: str, tensor: Tensor, path: Path) -> Slot:
    if tuple(tensor.shape) != slot.shape:
        raise LoadError(
            f"{name} in {path} has shape {list(tensor.shape)}; config.json calls for {list(slot.shape)}"
        )
    if not tensor.is_floating_point():
        raise LoadError(
            f"{name} in {path} has dtype {tensor.dtype}; wanted floating point, quantized files are not read"
        )
    return slot


def _rows(weights: Mapping[str, Tensor], slot: Slot) -> Tensor:
    return weights[slot.parameter].narrow(0, slot.start, slot.shape[0])


def _warn_of_ignored_copies(path: Path, slots: Mapping[str, Slot], weights: Mapping[str, Tensor]) -> None:
    for name, tensor in _tensors(path, list(slots)):
        kept = _rows(weights, _checked(slots[name], name, tensor, path))
        if not torch.equal(tensor.to(kept.dtype), kept.cpu()):
            logger.warning(
                "%s in %s differs from the embedding it is tied to; the embedding is used", name, path.name
            )
