"""`lamina explain`: what a model is compiled to, by which passes, from the cache or compiled now."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options

if TYPE_CHECKING:
    from ..compiler.execution.plan import Compiled

Html = Annotated[Path | None, typer.Option(help="Write a page to look at, in one file without links.")]


@options.spread
def explain(
    settings: options.Settings,
    model: options.Model = None,
    as_json: options.Json = False,
    html: Html = None,
) -> None:
    """Show each unique piece, what the passes did to it and why not more, its kernels and the guards.

    Weights are not read. What the cache lacks is compiled.
    """
    config = settings.config(model, load_format="dummy")
    from .progress import loading_progress

    with loading_progress() as progress:
        from ..common.store import Store
        from ..compiler.inspect.explain import explain_text
        from ..compiler.inspect.explain_page import explain_page
        from ..runtime.startup.loader import compile_only, resolve_runtime

        resolved = resolve_runtime(config, progress)
        compiled = compile_only(resolved, progress)
    if html is not None:
        page = explain_page(
            compiled, Store(config.cache_dir), title=Path(config.model).name, numerics=config.numerics
        )
        html.write_text(page, encoding="utf-8")
        typer.echo(f"written: {html}", err=True)
        return
    if as_json:
        facts = _facts(compiled) | {"quantization": resolved.schemes.facts()}
        print(json.dumps(facts, indent=2))
        return
    print("\n".join([explain_text(compiled), *resolved.schemes.sentences()]))


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
