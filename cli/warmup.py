"""`lamina warmup`: compile everything that serving needs, or say what of it is missing."""

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options

if TYPE_CHECKING:
    from ..runtime.config import RuntimeConfig

Check = Annotated[
    bool, typer.Option("--check", help="Compile nothing; exit with 1, naming it, if anything is missing.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Dummy = Annotated[bool, typer.Option("--dummy-weights", help="Random weights: config.json is enough.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens of a block of the KV cache.")]
Attention = Annotated[str, typer.Option(help="auto or the name of a provider of attention.")]
Model = Annotated[str, typer.Argument(help="A model folder, a .gguf file or a hub id.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Requests that are computed at once.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Tokens of a step at most.")]


def warmup(
    model: Model,
    check: Check = False,
    as_json: Json = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantization = None,
    numerics: options.Numerics = "fast",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    block_size: BlockSize = None,
    attention: Attention = "auto",
    dummy_weights: Dummy = False,
    cache_dir: options.CacheDir = None,
    without_pass: options.WithoutPass = None,
) -> None:
    """Fill the cache for serving with these settings, so that the next start compiles nothing.

    With --check: exit with 1 and name what is missing, if serving would compile, trace or build anything.
    """
    from ..runtime.config import RuntimeConfig

    config = RuntimeConfig(
        model=model,
        dtype=dtype,
        device=device,
        quantization=quantization,  # type: ignore[arg-type]  # checked by the config
        numerics=numerics,  # type: ignore[arg-type]  # checked by the config
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        attention=attention,
        load_format="dummy" if dummy_weights else "auto",
        cache_dir=cache_dir,
        compile=options.compile_setting(True, without_pass),
    )
    report = _check(config) if check else _fill(config)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    if check and report["missing"]:
        raise typer.Exit(1)


def _check(config: "RuntimeConfig") -> dict[str, Any]:
    from ..runtime.loading import missing
    from .progress import loading_progress

    with loading_progress() as progress:
        return {"missing": missing(config, progress)}


def _fill(config: "RuntimeConfig") -> dict[str, Any]:
    from ..runtime.runtime import Runtime
    from .progress import loading_progress

    started = time.perf_counter()
    with loading_progress() as progress, Runtime(config, progress) as runtime:
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
        print("not warm" if report["missing"] else "warm: serving with these settings compiles nothing")
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
