"""`lamina replay`: decide again what a decision log holds, and say where it comes out otherwise."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import options

File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A decision log, as Runtime.from_pretrained(record=…) writes it."),
]


def replay(
    file: File,
    as_json: options.Json = False,
) -> None:
    """Decide again, without a model, what a scheduler decided; exit code 1 if anything differs."""
    from ..runtime.scheduler.replay import replay as decide_again

    result = decide_again(file)
    if as_json:
        print(json.dumps(asdict(result), indent=2))
    elif result.difference is None:
        print(
            f"{result.num_steps} steps of {result.num_requests} requests, decided as they were: "
            f"{result.num_preemptions} preemptions, {result.num_hit_tokens} tokens hit in the prefix cache"
        )
    else:
        print(f"after {result.num_steps} steps: {result.difference}")
    if result.difference is not None:
        raise typer.Exit(1)
