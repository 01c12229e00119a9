"""`lamina explain`: what a model is compiled to, by which passes, from the cache or compiled now."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options

if TYPE_CHECKING:
    from ..compiler.execution.plan import Compiled

Errors = Annotated[
    bool, typer.Option("--errors", help="Read the weights, and tell scales and error of each quantized one.")
]
Html = Annotated[Path | None, typer.Option(help="Write a page to look at, in one file without links.")]


@options.spread
def explain(
    settings: options.Settings,
    model: options.Model = None,
    errors: Errors = False,
    as_json: options.Json = False,
    html: Html = None,
) -> None:
    """Show each unique piece, what the passes did to it and why not more, its kernels and the guards.

    Weights are not read, but for --errors. What the cache lacks is compiled.
    """
    config = settings.config(model, **({} if errors else {"load_format": "dummy"}))
    from .progress import loading_progress

    with loading_progress() as progress:
        from ..common.store import Store
        from ..compiler.inspect.explain import explain_text
        from ..compiler.inspect.explain_page import explain_page
        from ..models.quantization.kept import listed
        from ..runtime.startup.loader import compile_only, read_weights, resolve_runtime

        resolved = resolve_runtime(config, progress)
        compiled = compile_only(resolved, progress)
        drafter = None if resolved.drafter is None else compile_only(resolved.drafter, progress)
        weights = read_weights(resolved, progress) if errors else None
    kept = resolved.schemes.kept(resolved.dtype) if weights is None else weights.kept()
    if html is not None:
        page = explain_page(
            compiled, Store(config.cache_dir), title=Path(config.model).name, numerics=config.numerics
        )
        html.write_text(page, encoding="utf-8")
        typer.echo(f"written: {html}", err=True)
        return
    if as_json:
        projections = {name: asdict(one) for name, one in kept.items()}
        facts = _facts(compiled) | {"quantization": resolved.schemes.facts() | {"projections": projections}}
        facts["drafter"] = None if drafter is None else _facts(drafter)
        print(json.dumps(facts, indent=2))
        return
    sentences = [*(resolved.schemes if weights is None else weights).sentences(), *listed(kept)]
    sentences += [] if drafter is None else ["\nthe drafter\n", explain_text(drafter)]
    print("\n".join([explain_text(compiled), *sentences]))


def _facts(compiled: "Compiled") -> dict[str, Any]:
    plan = compiled.plan
    return {
        "pieces": [{**asdict(piece.artifact), "was_compiled": piece.was_compiled} for piece in plan.pieces],
        "steps": [asdict(step) for step in plan.steps],
        "reports": list(plan.reports),
        "guards": list(compiled.guards),
        "seconds": dict(compiled.seconds),
        "miss": compiled.miss,
    }
