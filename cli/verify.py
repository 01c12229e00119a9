"""`lamina verify`: a model compiled, run op by op and run by transformers, and which pass makes it differ."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from . import options

if TYPE_CHECKING:
    from ..compiler.inspect.verify import Error
    from ..runtime.verify import Verified

Prompts = Annotated[list[str] | None, typer.Option("--prompt", help="A text to compare on; may be repeated.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to continue each prompt by before comparing.")]


@options.spread
def verify(
    settings: options.Settings,
    model: options.Model = None,
    prompts: Prompts = None,
    max_tokens: MaxTokens = 4,
    as_json: options.Json = False,
) -> None:
    """Compare the compiled model with itself run op by op and with transformers, layer by layer.

    Exits with 1 where rounding does not explain a difference, naming the first piece that differs, the pass
    that makes it so, and the setting that leaves the pass out. Where values are not finite, it names the
    first layer that has such, and the weights that are not finite, before anything is compared.
    """
    config = settings.config(model, verify=False)
    from .progress import loading_progress

    with loading_progress() as progress:
        from ..runtime.verify import verify as compare

        found = compare(config, prompts or (), max_tokens, progress)
    print(json.dumps(asdict(found) | {"is_right": found.is_right}, indent=2) if as_json else _text(found))
    if not found.is_right:
        raise typer.Exit(1)


def _text(found: "Verified") -> str:
    from ..models.quantization.kept import listed

    pair = f"{'rms':>10} {'largest':>11}"
    lines = [
        f"{'':>7}  {'compiled to eager':>22}  {'compiled to transformers':>26}  {'eager to it':>22}",
        f"{'layer':>7}  {pair}  {pair:>26}  {pair}",
    ]
    for row in found.layers:
        name = "logits" if row.layer < 0 else str(row.layer)
        mark = "" if row.is_right else "  WRONG"
        errors = f"{_error(row.compiled_to_eager)}  {_error(row.compiled):>26}  {_error(row.eager)}"
        lines.append(f"{name:>7}  {errors}{mark}")
    worst = max(found.pieces, key=lambda check: check.compiled.rms)
    lines.append(
        f"{len(found.pieces)} pieces on the inputs they have op by op: errors to float64 at most "
        f"{worst.compiled.rms:.2e} rms and {worst.compiled.max:.2e}; op by op {worst.eager.rms:.2e} and "
        f"{worst.eager.max:.2e}"
    )
    lines += [
        f"prompt {one.prompt}, token {one.position}: compiled {one.compiled}, eager {one.eager}, "
        f"transformers {one.transformers}, margin {one.margin:.3g}"
        for one in found.differences
    ]
    lines += found.quantization
    lines += listed(found.projections)
    lines.append(f"{len(found.differences)} of {sum(map(len, found.prompts))} likeliest tokens differ")
    if found.reference != "transformers":
        lines.append(found.reference)
    return "\n".join([*lines, _verdict(found)])


def _verdict(found: "Verified") -> str:
    if found.culprit is not None:
        where = "" if found.first_wrong is None else f"piece {found.first_wrong} is the first that differs; "
        return f"WRONG: {where}{found.culprit.sentence()}"
    if found.is_right:
        return "right: rounding explains every difference"
    return "WRONG: every piece computes what its graph says, but the model differs from transformers"


def _error(error: "Error | None") -> str:
    """Root mean square and largest error, relative."""
    return f"{'-':>22}" if error is None else f"{error.rms:>10.2e} {error.max:>11.2e}"
