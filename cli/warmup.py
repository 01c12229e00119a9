"""`lamina warmup`: compile everything that serving needs, or say what of it is missing."""

import json
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options

if TYPE_CHECKING:
    from ..runtime.config import RuntimeConfig

Check = Annotated[
    bool, typer.Option("--check", help="Compile nothing; exit with 1, naming it, if anything is missing.")
]
Dummy = Annotated[bool, typer.Option("--dummy-weights", help="The same as --load-format dummy.")]


@options.spread
def warmup(
    settings: options.Settings,
    model: options.Model = None,
    check: Check = False,
    as_json: options.Json = False,
    dummy_weights: Dummy = False,
) -> None:
    """Fill the cache for serving with these settings, so that the next start compiles nothing.

    With --check: exit with 1 and name what is missing, if serving would compile, trace or build anything.
    """
    config = settings.config(model, **({"load_format": "dummy"} if dummy_weights else {}))
    report = _check(config) if check else _fill(config)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    if check and (report["missing"] or report["unmeasured"]):
        raise typer.Exit(1)


def _check(config: "RuntimeConfig") -> dict[str, Any]:
    from ..runtime.startup.loader import missing
    from .progress import loading_progress

    with loading_progress() as progress:
        return asdict(missing(config, progress))


def _fill(config: "RuntimeConfig") -> dict[str, Any]:
    """What one rank makes is what the others will load: it is tried alone, as if they said what it says.

    A stage of a pipeline calls pieces of the plan of all layers, which is what one process compiles.
    """
    from ..custom_ops.all_reduce.group import MirrorGroup, group_of_thread
    from ..runtime.runtime import Runtime
    from .progress import loading_progress

    started, config = time.perf_counter(), replace(config, pipeline_parallel=1)
    alone = group_of_thread(MirrorGroup(config.tensor_parallel))
    with loading_progress() as progress, alone, Runtime(config, progress) as runtime:
        runtime.warm_up()
        stats = runtime.stats()
    return {
        "seconds": time.perf_counter() - started,
        "compile": stats["compile"],
        "startup": stats["startup"],
    }


def _print(report: dict[str, Any]) -> None:
    if "missing" in report:
        for lack in report["missing"]:
            print(f"missing: {lack}")
        for lack in report["unmeasured"]:
            print(f"measured anew: {lack}")
        is_warm = not (report["missing"] or report["unmeasured"])
        print("warm: serving with these settings compiles nothing" if is_warm else "not warm")
        return
    pieces = report["compile"]
    print(
        f"warm in {report['seconds']:.1f} s: {pieces['compiled']} pieces compiled, {pieces['loaded']} loaded"
    )
    overlapped = report["startup"].pop("overlapped")
    for stage, seconds in report["startup"].items():
        if seconds >= 0.005:
            print(f"  {stage:<12} {seconds:7.2f} s")
    for name, seconds in overlapped.items():
        print(f"  ({name} took {seconds:.2f} s meanwhile)")
