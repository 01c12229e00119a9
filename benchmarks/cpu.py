"""Decode and prefill on the CPU against transformers: one run, interleaved rounds, medians and spread."""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bandwidth
import table
from contenders import Contender, Lamina, Prompts, Transformers

from lamina.cli.info import describe_machine
from lamina.common.store import Store
from lamina.models.source import resolve_source

RESULTS = Path(__file__).resolve().parent / "results"
BATCHES = (1, 8, 32)
CONTEXT = 100
PREFILL = 512
VOCABULARY = 10_000  # ids below this are ordinary tokens in every tokenizer met so far


def main() -> None:
    """Measure, write benchmarks/results/NAME.json, print the table."""
    options = parse_arguments()
    folder = resolve_source(options.model, store=Store(), dtype=options.dtype)
    contenders = make_contenders(options, folder)
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    loads, bandwidths = [], []
    for round_ in range(options.rounds + 1):
        loads.append(os.getloadavg()[0])
        bandwidths.append(bandwidth.measure())
        for key, figure in measure_round(contenders, round_, options.tokens):
            if round_:  # round 0 compiles and warms up
                samples[key].append(figure)
            print(f"round {round_}: {key[0]}, {key[1]}: {figure:.1f} tokens/s", file=sys.stderr)
    document = report(options, folder, samples, loads, bandwidths)
    (RESULTS / f"{options.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(table.render(document))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a model folder, a .gguf file or a hub id")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="tokens decoded a sequence and measurement")
    parser.add_argument("--no-compiled-peer", action="store_true", help="leave out torch.compile (minutes)")
    parser.add_argument("--name", default="cpu", help="name of the result file")
    return parser.parse_args()


def make_contenders(options: argparse.Namespace, folder: Path) -> list[Contender]:
    """All share one process, its threads and the same weights."""
    contenders: list[Contender] = [
        Lamina(str(folder), options.dtype, max(BATCHES), max(BATCHES) * CONTEXT),
        Transformers(folder, options.dtype, compiled=False),
    ]
    if not options.no_compiled_peer:
        contenders.append(Transformers(folder, options.dtype, compiled=True))
    return contenders


def measure_round(
    contenders: list[Contender], round_: int, num_tokens: int
) -> Iterator[tuple[tuple[str, str], float]]:
    """((workload, contender), tokens a second); whoever goes first moves on with every round."""
    first = round_ % len(contenders)
    order = contenders[first:] + contenders[:first]
    numbers = random.Random(round_)
    for batch in BATCHES:
        prompts = random_prompts(numbers, batch, CONTEXT)
        for contender in order:
            yield (f"decode, batch {batch}", contender.name), contender.decode(prompts, num_tokens)
    prompts = random_prompts(numbers, 1, PREFILL)
    for contender in order:
        if "compile" not in contender.name:  # its prefill is the eager one
            yield (f"prefill, {PREFILL} tokens", contender.name), PREFILL / contender.prefill(prompts)


def random_prompts(numbers: random.Random, count: int, length: int) -> Prompts:
    """New ids every time, so that no cache of prefixes can answer."""
    return [[numbers.randrange(100, VOCABULARY) for _ in range(length)] for _ in range(count)]


def report(
    options: argparse.Namespace,
    folder: Path,
    samples: dict[tuple[str, str], list[float]],
    loads: list[float],
    bandwidths: list[dict[str, float]],
) -> dict[str, Any]:
    """One JSON document that says what was measured, how and on what."""
    machine = {name: fact for name, fact in describe_machine().items() if not name.startswith("cache")}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"benchmarks/cpu.py --dtype {options.dtype} --rounds {options.rounds}"
        f" --tokens {options.tokens}",
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "context": CONTEXT,
        "weight_bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        "machine": machine,
        "load_average": [round(load, 2) for load in loads],
        "bandwidth_gb_s": {kind: round(max(row[kind] for row in bandwidths), 1) for kind in ("read", "copy")},
        "results": [
            {
                "workload": workload,
                "contender": contender,
                "unit": "tokens/s",
                "median": round(statistics.median(figures), 1),
                "min": round(min(figures), 1),
                "max": round(max(figures), 1),
                "samples": [round(figure, 1) for figure in figures],
            }
            for (workload, contender), figures in samples.items()
        ],
    }


if __name__ == "__main__":
    main()
