"""`lamina quantize`: a model written in fewer bytes, for Lamina, vLLM and transformers."""

import json
import re
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .interrupt import RaiseOnTermination

if TYPE_CHECKING:
    from ..runtime.quantize import QuantizedModel

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model folder, a .gguf file or a hub id; of float weights.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="The folder to write; it must not hold files.")]
GroupSize = Annotated[
    int | None,
    typer.Option(
        help="Columns that share a scale, of w4a16: 32, 64, 128 or -1, a row.  [default: what fits]"
    ),
]
Asymmetric = Annotated[bool, typer.Option("--asymmetric", help="A zero point for each group, of w4a16.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        help="Modules to leave as they are: a name with * and ?, or re: and a regular expression. "
        "May be repeated."
    ),
]
Gptq = Annotated[
    bool, typer.Option("--gptq", help="Keep the outputs on a text, instead of rounding to nearest.")
]
CalibrationText = Annotated[
    Path | None, typer.Option("--calibration", help="The text, as the model is to be used for; of --gptq.")
]
CalibrationTokens = Annotated[int, typer.Option(help="How many tokens of it are looked at; of --gptq.")]
PerplexityText = Annotated[
    Path | None, typer.Option("--perplexity", help="A text to tell both models' perplexity of.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the model that the folder holds.")]
Device = Annotated[str, typer.Option(help="Where --gptq and --perplexity compute: auto, cpu or cuda.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Token = Annotated[str | None, typer.Option(help="Hub token for gated models.")]
CALIBRATION_TOKENS = 32768  # as the library has it, which is not imported for --help
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")  # the number of a module's layer


class Scheme(StrEnum):
    """What projections become; checked against the library's own list in tests."""

    fp8 = "fp8"
    int8 = "int8"
    w4a16 = "w4a16"


SchemeOption = Annotated[
    Scheme, typer.Option("--scheme", help="A byte a weight, activations quantized too; or four bits.")
]


def quantize(
    model: Model,
    scheme: SchemeOption,
    output: Output,
    group_size: GroupSize = None,
    asymmetric: Asymmetric = False,
    ignore: Ignore = None,
    gptq: Gptq = False,
    calibration: CalibrationText = None,
    calibration_tokens: CalibrationTokens = CALIBRATION_TOKENS,
    perplexity: PerplexityText = None,
    overwrite: Overwrite = False,
    device: Device = "auto",
    revision: Revision = None,
    token: Token = None,
    cache_dir: options.CacheDir = None,
    as_json: options.Json = False,
) -> None:
    """Write a model with its projections quantized, in the format of compressed-tensors.

    The embedding, the LM head and norms stay as they are. The folder appears whole, or not at all.
    """
    if perplexity is not None:
        _check_text(perplexity)
    written = _written(
        model,
        output,
        scheme=scheme.value,
        group_size=group_size,
        symmetric=not asymmetric,
        ignore=ignore or (),
        gptq=gptq,
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        overwrite=overwrite,
        device=device,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
    )
    if not as_json:
        print(_text(written))
    measured = {}
    if perplexity is not None:
        settings = {"device": device, "cache_dir": cache_dir}
        hub = {"revision": revision, "token": token}
        measured["before"] = _perplexity(model, perplexity, settings | hub)
        measured["after"] = _perplexity(output, perplexity, settings)
    if as_json:
        print(json.dumps(_facts(written) | ({"perplexity": measured} if measured else {}), indent=2))
    elif measured:
        print(_comparison(**measured))


def _written(model: str, output: Path, **settings: Any) -> "QuantizedModel":
    """Write it, with progress on standard error; a signal ends the work, and removes what was written."""
    from ..runtime.quantize import quantize as write
    from .progress import loading_progress

    try:
        with loading_progress() as progress, RaiseOnTermination():
            return write(model, output, progress=progress, **settings)
    except (KeyboardInterrupt, SystemExit) as ended:
        typer.echo(f"interrupted: nothing half-made is left at {output}", err=True)
        raise typer.Exit(130 if isinstance(ended, KeyboardInterrupt) else int(ended.code or 0)) from None


def _check_text(path: Path) -> None:
    """Say of a text that cannot be read before the work, not after it."""
    from ..runtime.tokenization.text_windows import read_text

    read_text(path)


def _perplexity(model: str | Path, text: Path, settings: dict[str, Any]) -> dict[str, Any]:
    from ..runtime.perplexity import perplexity_of_file
    from .progress import loading_progress

    with loading_progress() as progress:
        return asdict(perplexity_of_file(model, text, progress=progress, **settings))


def _comparison(before: dict[str, Any], after: dict[str, Any]) -> str:
    change = after["value"] / before["value"] - 1
    return (
        f"perplexity of {before['num_tokens']} tokens: {before['value']:.3f} before, "
        f"{after['value']:.3f} after ({change:+.2%})"
    )


def _facts(written: "QuantizedModel") -> dict[str, Any]:
    return asdict(written) | {"folder": str(written.folder)}


def _text(written: "QuantizedModel") -> str:
    before, after = written.bytes_before, written.bytes_after
    return "\n".join(
        [
            *_table(written),
            f"left as they are: the embedding, norms, biases, {', '.join(written.ignored)}",
            f"{before / 1e6:.1f} MB became {after / 1e6:.1f} MB ({after / before:.0%}): {written.folder}",
        ]
    )


def _table(written: "QuantizedModel") -> list[str]:
    """A row a layer: how far weights are off by their root mean square, and outputs where that is known."""
    rows: dict[str, dict[str, str]] = {}
    for name, error in written.errors.items():
        layer = LAYER.search(name)
        cell = f"{error.relative_rms:.2%}"
        if error.output_rms is not None:
            cell += f" ({error.output_rms:.2%})"
        rows.setdefault(layer[0] if layer else "-", {})[name.rpartition(".")[2]] = cell
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    width = max(len(text) for text in (*columns, *(cell for row in rows.values() for cell in row.values())))
    what = "off by, rms of weights"
    if any(error.output_rms is not None for error in written.errors.values()):
        what += " (and of outputs on the calibration text)"
    return [
        what,
        "layer  " + "  ".join(f"{column:>{width}}" for column in columns),
        *(
            f"{layer:>5}  " + "  ".join(f"{row.get(column, '-'):>{width}}" for column in columns)
            for layer, row in rows.items()
        ),
    ]
