"""`lamina verify`: a model compiled, run op by op and run by transformers, and which pass makes it differ."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options

if TYPE_CHECKING:
    from ..compiler.inspect.verify import Error
    from ..runtime.batch_invariance import Invariance
    from ..runtime.config import RuntimeConfig
    from ..runtime.verify import Verified

Prompts = Annotated[list[str] | None, typer.Option("--prompt", help="A text to compare on; may be repeated.")]
Mixes = Annotated[int, typer.Option(min=1, help="With --batch-invariant: random mixes of requests to run.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to continue each prompt by before comparing.")]


@options.spread
def verify(
    settings: options.Settings,
    model: options.Model = None,
    prompts: Prompts = None,
    max_tokens: MaxTokens = 4,
    mixes: Mixes = 50,
    as_json: options.Json = False,
) -> None:
    """Compare the compiled model with itself run op by op and with transformers, layer by layer.

    Exits with 1 where rounding does not explain a difference, naming the first piece that differs, the pass
    that makes it so, and the setting that leaves the pass out. Where values are not finite, it names the
    first layer that has such, and the weights that are not finite, before anything is compared.

    With --batch-invariant it compares instead, bit for bit, the logits of requests alone and in random mixes:
    of several sizes, cut, with prefixes from the cache, preempted. Exits with 1 where any differs, naming the
    first layer that makes it so.
    """
    config = settings.config(model, verify=False)
    if config.batch_invariant:
        _compare_mixes(config, prompts or (), mixes, as_json)
        return
    from .progress import loading_progress

    with loading_progress() as progress:
        from ..runtime.verify import verify as compare

        found = compare(config, prompts or (), max_tokens, progress)
    print(json.dumps(asdict(found) | {"is_right": found.is_right}, indent=2) if as_json else _text(found))
    if not found.is_right:
        raise typer.Exit(1)


def _compare_mixes(config: "RuntimeConfig", prompts: Any, num_mixes: int, as_json: bool) -> None:
    from .progress import loading_progress

    with loading_progress() as progress:
        from ..runtime.batch_invariance import check_batch_invariance

        found = check_batch_invariance(config, prompts, num_mixes, progress)
    print(
        json.dumps(asdict(found) | {"is_right": found.is_right}, indent=2) if as_json else _mixes_text(found)
    )
    if not found.is_right:
        raise typer.Exit(1)


def _mixes_text(found: "Invariance") -> str:
    lines = [
        f"{found.num_mixes} mixes of {found.num_requests} requests: {', '.join(found.variants)}",
        f"{found.num_logits} rows of logits compared; {found.num_preemptions} requests preempted, "
        f"{found.num_cached_tokens} tokens of prompts found in the prefix cache",
    ]
    lines += [
        f"mix {one.mix}: prompt {one.prompt}, behind token {one.position}: {one.num_ids} logits differ, by "
        f"{one.largest:.3g} at most"
        for one in found.mismatches
    ]
    if found.is_right:
        return "\n".join([*lines, "right: every bit is that of the request alone"])
    where = found.first or "no call of the plan shows it alone; what captures or schedules steps may"
    return "\n".join([*lines, f"WRONG: {where}"])


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
