"""A quantized checkpoint: weights rounded to nearest or by GPTQ, config.json, and the files beside them."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...common.errors import LoadError, StoreError
from ...common.progress import Progress
from ..checkpoints.safetensors_header import Layout, num_bytes
from . import calibration
from .compressed_tensors import ROWS_A_WORD, layout, quantization_config, tensors
from .gptq import codes_by_gptq, hessian_of
from .grids import Fit, grid_of
from .shard_writer import MAX_SHARD_BYTES, ShardWriter
from .source import CONFIG_NAME, Module, SourceModel

STAGE = "quantize"  # of progress
COPIED_FILES = (  # what belongs to a model beside its weights and its config
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*"),
    *("merges.txt", "*.model", "tekken.json", "chat_template*", "*.jinja", "additional_chat_templates/*"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*"),
)
ZERO_POINT = "weight_zero_point"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionError:
    """How far a quantized projection is from the original's."""

    relative_rms: float  # root of the mean square of the weights' error, by that of the weights
    output_rms: float | None  # the same of its outputs on the calibration text; None without one


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What was written: bytes of all tensors before and after, and the error of each quantized module."""

    bytes_before: int
    bytes_after: int
    errors: dict[str, ProjectionError]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Token ids in windows, each a sequence of its own, and where they are computed."""

    windows: Sequence[Sequence[int]]
    device: torch.device


def layout_of(source: SourceModel) -> Layout:
    """Every tensor of the quantized checkpoint, in the original's order."""
    modules = {module.weight.name: module for module in source.modules}
    whole: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, tensor in source.tensors.items():
        module = modules.get(name)
        if module is None:
            whole[name] = (tensor.dtype, tensor.shape)
        else:
            parts = layout(source.recipe, tensor.shape, tensor.dtype)
            whole |= {f"{module.name}.{part}": one for part, one in parts.items()}
    return whole


def write_checkpoint(
    source: SourceModel,
    folder: Path,
    *,
    progress: Progress,
    calibrated: Calibration | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Written:
    """Write all files of the quantized checkpoint to an empty folder; by GPTQ where there is a calibration.

    Raises LoadError for weights that are not finite, and StoreError for a file that cannot be written.
    """
    with ShardWriter(folder, layout_of(source), max_shard_bytes) as writer:
        work = _Work(source, writer, progress)
        for tensor in source.copied:
            for first, rows in tensor.chunks():
                writer.write(tensor.name, rows, first)
        if calibrated is not None:
            calibration.run(source, calibrated.windows, work.multiply, calibrated.device)
        for module in source.modules:
            if module.name not in work.errors:
                work.round(module)
        writer.finish()
    _write_files(source, folder)
    return Written(
        bytes_before=sum(num_bytes(each.dtype, each.shape) for each in source.tensors.values()),
        bytes_after=writer.num_bytes,
        errors={module.name: work.errors[module.name] for module in source.modules},
    )


class _Work:
    """Projections quantized one after another, each written as soon as it is."""

    def __init__(self, source: SourceModel, writer: ShardWriter, progress: Progress) -> None:
        self.errors: dict[str, ProjectionError] = {}
        self._source, self._grid = source, grid_of(source.recipe)
        self._writer, self._progress = writer, progress
        self._of_parameter: dict[str, list[Module]] = {}
        for module in source.modules:
            self._of_parameter.setdefault(module.parameter, []).append(module)

    def round(self, module: Module) -> None:
        """Round a projection to nearest, some rows at a time."""
        error = weight = 0.0
        for first, stored in module.weight.chunks():
            rows = _finite(module, stored.float())
            fit = self._grid.fit(rows, module.weight.dtype)
            codes = self._grid.codes_of_rows(rows, fit)
            self._write(module, codes, fit, first)
            error += _sum_of_squares(self._grid.restore_rows(codes, fit).sub_(rows))
            weight += _sum_of_squares(rows)
        self._end(module, ProjectionError(relative_rms=_root(error, weight), output_rms=None))

    def multiply(self, parameter: str, inputs: Tensor) -> Tensor:
        """Quantize a parameter's projections by GPTQ for these inputs [T, K]; outputs [T, N] with those.

        A projection that stays as it is, or was quantized before, multiplies as it is.
        """
        modules = self._of_parameter.get(parameter)
        if modules is None:
            sources = [self._source.tensors[name] for name in self._source.specs[parameter].sources]
            return torch.cat([inputs @ each.read().to(inputs).T for each in sources], dim=1)
        hessian = hessian_of(inputs)
        return torch.cat([inputs @ self._by_gptq(module, hessian).T for module in modules], dim=1)

    def _by_gptq(self, module: Module, hessian: Tensor) -> Tensor:
        """What the quantized projection [N, K] stands for."""
        rows = _finite(module, module.weight.read().to(hessian))
        try:
            codes, fit = codes_by_gptq(rows, hessian.clone(), self._grid, module.weight.dtype)
        except LoadError as error:
            raise LoadError(f"{module.name} {error}") from error
        restored = self._grid.restore_rows(codes, fit)
        self._write(module, codes, fit, 0)
        off = restored - rows
        costs = [float(((each @ hessian) * each).sum(dtype=torch.float64)) for each in (off, rows)]
        relative = _root(_sum_of_squares(off), _sum_of_squares(rows))
        self._end(module, ProjectionError(relative_rms=relative, output_rms=_root(*costs)))
        return restored

    def _write(self, module: Module, codes: Tensor, fit: Fit, first: int) -> None:
        parts = tensors(self._source.recipe, codes, fit, module.weight.dtype)
        for part, rows in parts.items():
            row = first // ROWS_A_WORD if part == ZERO_POINT else first
            self._writer.write(f"{module.name}.{part}", rows, row)
        if first == 0 and "weight_packed" in parts:
            self._writer.write(f"{module.name}.weight_shape", torch.tensor(module.weight.shape))

    def _end(self, module: Module, error: ProjectionError) -> None:
        self.errors[module.name] = error
        self._progress(STAGE, len(self.errors) / len(self._source.modules), module.name)


def _finite(module: Module, rows: Tensor) -> Tensor:
    if not bool(rows.isfinite().all()):
        raise LoadError(
            f"{module.weight.name} in {module.weight.path} holds weights that are not finite (NaN or "
            "infinity); the checkpoint is damaged: download it again, or ignore the module"
        )
    return rows


def _sum_of_squares(values: Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))


def _root(error: float, whole: float) -> float:
    return math.sqrt(max(error, 0.0) / whole) if whole > 0 else 0.0


def _write_files(source: SourceModel, folder: Path) -> None:
    """config.json with what the tensors are, and the files of the original that belong to any form of it."""
    config = {**source.config, "quantization_config": quantization_config(source.recipe, source.ignored)}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    try:
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
        for pattern in COPIED_FILES:
            for path in sorted(source.folder.glob(pattern)):
                if path.is_file():
                    to = folder / path.relative_to(source.folder)
                    to.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, to)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror or error}; make room") from error
