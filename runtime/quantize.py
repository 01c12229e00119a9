"""A model written in fewer bytes: a checkpoint that Lamina, vLLM and transformers read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..common.errors import ConfigError, LoadError, shown
from ..common.progress import Progress, say_nothing
from ..common.store import Store
from ..models.checkpoints.safetensors_header import num_bytes
from ..models.checkpoints.source import resolve_source
from ..models.quantizing.output import check_output, new_folder
from ..models.quantizing.recipe import Recipe
from ..models.quantizing.source import SourceModel, read_source
from ..models.quantizing.write import Calibration, ProjectionError, layout_of, write_checkpoint
from .startup.resolve import resolve_device
from .tokenization.text_windows import WINDOW, read_windows

DEFAULT_CALIBRATION_TOKENS = 32768


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedModel:
    """A quantized checkpoint: its folder, the bytes of all tensors before and after, and what it cost."""

    folder: Path
    bytes_before: int
    bytes_after: int
    errors: dict[str, ProjectionError]
    """Of each quantized module, by its name in the checkpoint."""

    ignored: tuple[str, ...]
    """Modules that stay as they are."""


def quantize(
    model: str | Path,
    output: str | Path,
    *,
    scheme: str,
    group_size: int | None = None,
    symmetric: bool = True,
    ignore: Sequence[str] = (),
    gptq: bool = False,
    calibration: str | Path | None = None,
    calibration_tokens: int = DEFAULT_CALIBRATION_TOKENS,
    overwrite: bool = False,
    device: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress = say_nothing,
) -> QuantizedModel:
    """Write a model with its projections quantized to a folder, in the format of compressed-tensors.

    `model` is a folder, a .gguf file or a hub id, of float weights. `scheme` is fp8 or int8 (a scale a row,
    activations quantized as they come) or w4a16 (four bits; `group_size` columns share a scale: 32, 64, 128,
    -1 for a whole row, or None for the largest that divides every projection's columns; with
    `symmetric=False` a zero point too). Weights are rounded to nearest, a few million at a time; with
    `gptq=True` so that the outputs on a text, `calibration`, are kept: the model runs once over
    `calibration_tokens` of it on `device`, in float32. The embedding, the LM head, norms, biases and modules
    that `ignore` names stay as they are.

    The folder appears whole or not at all; one that holds files is only replaced with `overwrite=True`.
    Raises ConfigError for settings that do not go together, UnsupportedError for a model that is quantized
    already, LoadError for weights that are not finite, and StoreError where the folder cannot be written.
    """
    recipe = Recipe(
        scheme=scheme, group_size=group_size, symmetric=symmetric, ignore=_as_tuple("ignore", ignore)
    )
    _check_calibration(gptq, calibration)
    if not str(output):
        raise ConfigError("output is ''; wanted the folder to write")
    output, original = Path(output).expanduser(), Path(model).expanduser()
    if str(model) and original.exists():  # a hub id is in nobody's way
        check_output(output, original, overwrite=overwrite)
    store = Store(cache_dir)
    resolve = partial(resolve_source, revision=revision, token=token, progress=progress)
    folder = resolve(model, store=store, needs_tokenizer=gptq)
    check_output(output, folder, overwrite=overwrite)
    source = read_source(folder, recipe)
    calibrated = None
    if calibration is not None:
        windows = _calibration_windows(source, Path(calibration), calibration_tokens)
        calibrated = Calibration(windows=windows, device=resolve_device(device))
    return _written(source, output, overwrite, calibrated, progress)


def _written(
    source: SourceModel,
    output: Path,
    overwrite: bool,
    calibrated: Calibration | None,
    progress: Progress,
) -> QuantizedModel:
    size = sum(num_bytes(*one) for one in layout_of(source).values())
    with new_folder(output, size, overwrite=overwrite) as new:
        written = write_checkpoint(source, new, progress=progress, calibrated=calibrated)
    return QuantizedModel(
        folder=output,
        bytes_before=written.bytes_before,
        bytes_after=written.bytes_after,
        errors=written.errors,
        ignored=source.ignored,
    )


def _as_tuple(name: str, patterns: Sequence[str]) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise ConfigError(f"{name} is {shown(patterns)}; wanted a list of patterns")
    return tuple(patterns)


def _check_calibration(gptq: bool, calibration: str | Path | None) -> None:
    if gptq and calibration is None:
        raise ConfigError(
            "gptq is True and calibration is None; wanted a file with text as the model is to be used for"
        )
    if calibration is not None and not gptq:
        raise ConfigError(
            f"calibration is {shown(str(calibration))} and gptq is False; rounding to nearest looks at no "
            "text: leave it out, or use gptq=True"
        )


def _calibration_windows(source: SourceModel, text: Path, num_tokens: int) -> list[list[int]]:
    windows = read_windows(source.folder, text, num_tokens, min(WINDOW, source.model.declared_positions))
    highest = max(max(ids) for ids in windows)
    if highest >= source.model.vocab_size:
        raise LoadError(
            f"{source.folder} has a tokenizer with token id {highest}, and a vocab_size of "
            f"{source.model.vocab_size}; wanted files of one model"
        )
    return windows
