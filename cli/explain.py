"""`lamina explain`: what a model is compiled to, by which passes, from the cache or compiled now."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options

if TYPE_CHECKING:
    from ..compiler.compile import Compiled

Model = Annotated[str, typer.Argument(help="A model folder, a .gguf file or a hub id.")]
Html = Annotated[Path | None, typer.Option(help="Write a page to look at, in one file without links.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def explain(
    model: Model,
    as_json: Json = False,
    html: Html = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantization = None,
    numerics: options.Numerics = "fast",
    max_model_len: options.MaxModelLen = None,
    cache_dir: options.CacheDir = None,
    without_pass: options.WithoutPass = None,
) -> None:
    """Show each unique piece, what the passes did to it and why not more, its kernels and the guards.

    Weights are not read. What the cache lacks is compiled.
    """
    from ..runtime.config import RuntimeConfig
    from .progress import loading_progress

    config = RuntimeConfig(
        model=model,
        dtype=dtype,
        device=device,
        quantization=quantization,  # type: ignore[arg-type]  # checked by the config
        numerics=numerics,  # type: ignore[arg-type]  # checked by the config
        max_model_len=max_model_len,
        load_format="dummy",
        cache_dir=cache_dir,
        compile=options.compile_setting(True, without_pass),
    )
    with loading_progress() as progress:
        from ..common.store import Store
        from ..compiler.explain import explain_text
        from ..compiler.explain_page import explain_page
        from ..runtime.loading import compile_only, find

        compiled = compile_only(find(config, progress), progress)
    if html is not None:
        page = explain_page(compiled, Store(cache_dir), title=Path(model).name, numerics=numerics)
        html.write_text(page, encoding="utf-8")
        typer.echo(f"written: {html}", err=True)
        return
    print(json.dumps(_facts(compiled), indent=2) if as_json else explain_text(compiled))


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
