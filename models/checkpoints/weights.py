"""A model's weights: read from safetensors straight into the fused tensors it uses, or invented."""

import dataclasses
import re
from collections import Counter, deque
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.errors import LoadError
from ...common.logging import get_logger
from ...common.progress import Progress, say_nothing
from ..config import DTYPES, ModelConfig
from ..quantization.model_schemes import ModelSchemes
from ..registry import ModelDefinition, ParameterSpec
from ..sharding import Share
from .loaded_weights import LoadedWeights
from .quantized.configs import read_dialect
from .quantized.kv_scales import is_kv_scale, kv_scales
from .quantized.modules import (
    QuantizedModule,
    names_of_tensors,
    names_replaced,
    own_schemes,
    quantized_modules,
)
from .read_ahead import ReadAhead
from .shards import Headers, listed, opened, tensor_headers
from .tensor_parts import Part, cut, extents

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

    schemes: ModelSchemes  # that keep what it holds as it is
    files: Mapping[Path, Headers]
    slots: Mapping[str, Slot]
    modules: Mapping[str, QuantizedModule]  # by name
    owners: Mapping[str, tuple[str, str]]  # the module of a tensor, and what its format calls the tensor
    num_kv_heads: int

    @property
    def specs(self) -> Mapping[str, ParameterSpec]:
        """Every parameter of the model."""
        return self.schemes.specs

    def parameter_of(self, tensor: str) -> str | None:
        """The parameter that a tensor fills, by itself or as a part of a module; None for none."""
        if tensor in self.slots:
            return self.slots[tensor].parameter
        return self.modules[self.owners[tensor][0]].parameter if tensor in self.owners else None


def read_checkpoint(definition: ModelDefinition, config: ModelConfig, folder: Path) -> Checkpoint:
    """What the headers of a folder's files say; no weight is read.

    Raises LoadError for a tensor without a place, a place without a tensor, or a shape or dtype that the
    config does not call for; UnsupportedError for a quantization that is not served.
    """
    files, specs = tensor_headers(folder), definition.parameters(config)
    headers = {name: header for held in files.values() for name, header in held.items()}
    dialect = read_dialect(folder)
    modules = quantized_modules(dialect, specs)
    schemes = own_schemes(dialect, modules, specs)
    schemes.tables(torch.float32)
    owners = {
        name: (module.name, key) for module in modules for key, name in module.held(headers, folder).items()
    }
    shapes = {name: header.shape for name, header in headers.items()}
    return Checkpoint(
        schemes=schemes,
        files=files,
        slots=check_tensors(definition, config, shapes, folder, modules),
        modules={module.name: module for module in modules},
        owners=owners,
        num_kv_heads=config.num_kv_heads,
    )


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    schemes: ModelSchemes | None = None,
    rank: int = 0,
    progress: Progress = say_nothing,
    into: LoadedWeights | None = None,
    read_ahead: ReadAhead | None = None,
) -> LoadedWeights:
    """Every weight of a checkpoint, projections as their schemes keep them; None: as the checkpoint does.

    Where the schemes are of one of several ranks or stages, its part of each: of what is kept as it lies
    nothing else is read, but for other columns of rows that are read ahead. into: weights of the same
    schemes, dtype and device, which are filled anew in place of new ones. read_ahead: how to read what is
    kept as it lies; None: by threads for a GPU, else as views of the files. Raises LoadError for a file that
    is damaged, or holds something else than its header said.
    """
    placed = {module.parameter for module in checkpoint.modules.values()}
    kept_by = schemes or checkpoint.schemes
    weights = into or LoadedWeights(kept_by, dtype=dtype, device=device, rank=rank, placed=placed)
    weights.begin_again()
    files, slots, shares = checkpoint.files, checkpoint.slots, weights.schemes.shares(rank)
    quantized, scales = _ModuleReader(checkpoint, weights, shares), []
    if read_ahead is None and weights.device.type == "cuda":
        read_ahead = ReadAhead(weights.device)
    done, total, held = 0, sum(len(names) for names in files.values()), {None, *weights.specs}
    for path, names in files.items():
        own = [name for name in names if checkpoint.parameter_of(name) in held]
        read = [name for name in own if not (name in slots and slots[name].is_copy)]
        wanted = [name for name in read if not DERIVED_TENSORS.fullmatch(name)]
        parts = _parts(wanted, slots, shares, weights)
        with closing(_read(checkpoint, path, parts, weights, read_ahead)) as found:
            for part, tensor in found:
                name = part.name
                if name in checkpoint.owners:
                    quantized.take(name, tensor)
                elif part.run is not None:
                    columns = None if part.columns else shares[name].columns
                    weights.take(slots[name].parameter, part.run.to, _floating(name, tensor, path), columns)
                elif is_kv_scale(name):
                    scales.append((name, tensor))
                else:
                    _check_zero(name, tensor, path)
                done += part.is_last
                progress("weights", done / total, path.name)
    for path, names in files.items():
        copies = [name for name in names if name in slots and slots[name].is_copy]
        copies = [name for name in copies if slots[name].parameter in held]
        _warn_of_ignored_copies(path, _parts(copies, slots, shares, weights), slots, weights)
    weights.fill_up()
    weights.kv_scales |= kv_scales(scales, checkpoint.num_kv_heads)
    weights.settle()
    progress("weights", 1.0, "")
    return weights


class _ModuleReader:
    """Takes the tensors of quantized modules in any order, and fills a parameter once a module is whole."""

    def __init__(self, checkpoint: Checkpoint, weights: LoadedWeights, shares: Mapping[str, Share]) -> None:
        self._checkpoint, self._weights, self._shares = checkpoint, weights, shares
        self._held: dict[str, dict[str, Tensor]] = {}
        self._counts = Counter(module for module, _ in checkpoint.owners.values())

    def take(self, name: str, tensor: Tensor) -> None:
        """Fill the rows of the tensor's module if it is the last of them."""
        module, key = self._checkpoint.owners[name]
        held = self._held.setdefault(module, {})
        held[key] = tensor.to(self._weights.device)
        if len(held) == self._counts[module]:
            self._fill(self._checkpoint.modules[module], self._held.pop(module))

    def _fill(self, module: QuantizedModule, tensors: Mapping[str, Tensor]) -> None:
        parts, share = module.unpack(tensors), self._shares[module.source]
        for run in share.runs:
            if module.format.is_dequantized:
                rows = parts[0].narrow(0, run.start, run.num_rows)
                self._weights.take(module.parameter, run.to, rows, share.columns)
            else:
                kept = module.part(parts, run, share.columns)
                self._weights.place(module.parameter, run.to, run.num_rows, kept)


def dummy_weights(
    definition: ModelDefinition,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    schemes: ModelSchemes | None = None,
    rank: int = 0,
    into: LoadedWeights | None = None,
) -> LoadedWeights:
    """Weights as a new model would have them: norms of one, all else normal with deviation 0.02.

    Schemes make of them what they would make of a checkpoint's, and ranks have their parts of them. into: as
    in load_weights().
    """
    schemes = schemes or ModelSchemes(specs=definition.parameters(config))
    weights = into or LoadedWeights(schemes, dtype=dtype, device=device, rank=rank)
    weights.begin_again()
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, spec in schemes.whole_specs.items():  # all of them, so that each stage has the same numbers
        if not spec.tied_to:
            is_own = name in weights.specs
            value = (
                weights.room(name, spec.shape)
                if is_own
                else torch.empty(spec.shape, dtype=dtype, device=device)
            )
            if name.endswith("norm"):
                value.fill_(1.0)
            else:
                value.normal_(0.0, 0.02, generator=generator)
            for run, columns in weights.schemes.runs_of(name, rank) if is_own else ():
                weights.take(name, run.to, value.narrow(0, run.start, run.num_rows), columns)
    weights.fill_up()
    weights.settle()
    return weights


def slots_of(specs: Mapping[str, ParameterSpec]) -> dict[str, Slot]:
    """Where each tensor of a checkpoint that is not quantized belongs, by name."""
    slots: dict[str, Slot] = {}
    for parameter, spec in specs.items():
        start = 0
        for source, shape in spec.source_shapes.items():
            slots[source] = Slot(spec.tied_to or parameter, start, shape, is_copy=spec.tied_to is not None)
            start += shape[0]
    return slots


def check_tensors(
    definition: ModelDefinition,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    origin: Path,
    modules: Sequence[QuantizedModule] = (),
) -> dict[str, Slot]:
    """Where each tensor of a checkpoint belongs, by name, but for those of quantized modules.

    LoadError for one without a place, a place without one, or a shape that the config does not call for. A
    checkpoint may hold the tied name of a parameter alone.
    """
    specs, replaced = definition.parameters(config), names_replaced(modules)
    slots = {name: slot for name, slot in slots_of(specs).items() if name not in replaced}
    slots = _held_ties(specs, slots, shapes)
    zeros = {f"{module.name}.bias" for module in modules}  # which some tools write where there is none
    unknown = sorted(
        name
        for name in shapes.keys() - slots.keys() - names_of_tensors(modules) - zeros
        if not DERIVED_TENSORS.fullmatch(name) and not is_kv_scale(name)
    )
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


def _parts(
    names: Iterable[str], slots: Mapping[str, Slot], shares: Mapping[str, Share], weights: LoadedWeights
) -> list[Part]:
    """What is to be read of each tensor; a scheme wants whole rows, and modules are unpacked whole."""
    found = []
    for name in names:
        if name not in slots:
            found.append(Part(name))
            continue
        runs, columns = shares[name]
        columns = None if slots[name].parameter in weights.schemes.schemes else columns
        found += [Part(name, run, columns, run is runs[-1]) for run in runs]
    return found


def _read(
    checkpoint: Checkpoint,
    path: Path,
    parts: Iterable[Part],
    weights: LoadedWeights,
    read_ahead: ReadAhead | None,
) -> Generator[tuple[Part, Tensor]]:
    """Parts of a file's tensors: those read ahead on the device, and smaller, then all others as views."""
    ahead, others = [], []
    headers, slots = checkpoint.files[path], checkpoint.slots
    for part in parts:
        is_plain = part.run is not None and not weights.kept_with(slots[part.name].parameter)
        pieces = cut(part, headers[part.name], read_ahead.buffer_bytes) if read_ahead and is_plain else []
        ahead += pieces
        others += [] if pieces else [part]
    if read_ahead is not None and ahead:
        with closing(read_ahead.tensors(path, extents(path, ahead, headers))) as tensors:
            for part, tensor in zip(ahead, tensors, strict=True):
                yield part, tensor if part.columns is None else tensor.narrow(1, *part.columns)
    yield from _tensors(path, others)


def _tensors(path: Path, parts: Iterable[Part]) -> Iterator[tuple[Part, Tensor]]:
    """Parts of a file's tensors, as views of it."""
    left = deque(parts)
    while left:
        mapped = 0
        with opened(path) as file:
            while left and mapped < MAPPED_BYTES:
                tensor = left[0].read(file)
                mapped += tensor.nbytes
                yield left.popleft(), tensor


def _floating(name: str, tensor: Tensor, path: Path) -> Tensor:
    if tensor.dtype not in DTYPES.values():
        wanted = f"one of {', '.join(DTYPES)}, since no config says that it is quantized"
        raise LoadError(f"{name} in {path} has dtype {tensor.dtype}; wanted {wanted}")
    return tensor


def _check_zero(name: str, tensor: Tensor, path: Path) -> None:
    if bool(tensor.any()):
        raise LoadError(f"{name} in {path} is not all zero, and the model's config gives it no place")


def _warn_of_ignored_copies(
    path: Path, parts: Iterable[Part], slots: Mapping[str, Slot], weights: LoadedWeights
) -> None:
    for part, tensor in _tensors(path, parts):
        assert part.run is not None, "a copy of nothing"
        kept = weights.rows(slots[part.name].parameter, part.run.to, part.run.num_rows)
        if not torch.equal(_floating(part.name, tensor, path).to(kept.dtype), kept.cpu()):
            logger.warning(
                "%s in %s differs from the embedding it is tied to; the embedding is used",
                part.name,
                path.name,
            )
