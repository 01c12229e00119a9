"""Decode and prefill on the CPU beside transformers and llama.cpp: interleaved rounds, medians and spread."""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bandwidth
import table
import torch
from contenders import Contender, Lamina, Prompts, Spent, Transformers

from lamina import CompileConfig
from lamina.cli.info import describe_machine
from lamina.common.store import Store
from lamina.models.checkpoints.source import resolve_source

RESULTS = Path(__file__).resolve().parent / "results"
BATCHES = (1, 8, 32)
CONTEXT = 100
PREFILL = 512
WARM_UP = 4  # tokens a sequence in round 0, in which CPU call graphs are captured and checked
VOCABULARY = 10_000  # ids below this are ordinary tokens in every tokenizer met so far
# contender: settings of the runtime beside the defaults
OURS: dict[str, dict[str, Any]] = {
    "lamina": {},
    "lamina-int8": {"quantization": "int8"},
    "lamina-q8": {"quantization": "q8"},
    "lamina-q4": {"quantization": "q4"},
    "lamina-invariant": {"compile": CompileConfig(batch_invariant=True)},
    "lamina-file": {},  # the model as it lies, a GGUF file in its own blocks
}
USUAL = ("lamina", "lamina-int8")
PEERS = ("transformers", "transformers+compile")

Samples = dict[tuple[str, str], list[Spent]]


def main() -> None:
    """Measure, write benchmarks/results/NAME.json, print the table."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    folder = resolve_source(options.model, store=Store(), dtype=getattr(torch, options.dtype))
    contenders = make_contenders(options, folder)
    samples: Samples = defaultdict(list)
    conditions = []
    for round_ in range(options.rounds + 1):
        conditions.append(run_round(contenders, round_, options, samples))
    document = report(options, folder, contenders, samples, conditions[1:])
    (RESULTS / f"{options.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(table.render(document))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a model folder, a .gguf file or a hub id")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=at_least_one, default=5, help="measured, after one that warms up")
    parser.add_argument(
        "--tokens", type=at_least_one, default=32, help="tokens decoded a sequence and measurement"
    )
    parser.add_argument(
        "--threads", type=at_least_one, default=torch.get_num_threads(), help="of each contender"
    )
    parser.add_argument(
        "--beside",
        type=count,
        default=0,
        metavar="N",
        help="busy processes of equal priority during every measurement, of all contenders alike",
    )
    parser.add_argument("--batches", type=at_least_one, nargs="*", default=BATCHES)
    parser.add_argument(
        "--contenders", nargs="*", choices=(*OURS, *PEERS), default=(*USUAL, *PEERS), help="beside --gguf"
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        nargs="*",
        default=(),
        help="files NAME.TYPE.gguf of the model for llama.cpp; docs/cpu.md says how to build it",
    )
    parser.add_argument("--name", default="cpu", help="name of the result file")
    return parser.parse_args()


def count(text: str) -> int:
    """A whole number from the command line."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}; wanted a whole number")
    return int(text)


def at_least_one(text: str) -> int:
    """A count from the command line; nothing is not worth a run."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; wanted a whole number >= 1")
    return int(text)


def make_contenders(options: argparse.Namespace, folder: Path) -> list[Contender]:
    """All share one process and as many threads, and compute with the same weights, in their own types."""
    batch = max(options.batches, default=1)
    tokens = max(batch * CONTEXT, PREFILL)
    make: dict[str, Callable[[], Contender]] = {
        name: lambda name=name: Lamina(  # type: ignore[misc]
            name,
            str(options.model if name == "lamina-file" else folder),
            batch,
            tokens,
            dtype=options.dtype,
            **OURS[name],
        )
        for name in OURS
    }
    make |= {
        name: lambda name=name: Transformers(  # type: ignore[misc]
            name, folder, options.dtype, options.tokens, compiled=name.endswith("compile")
        )
        for name in PEERS
    }
    contenders = [make[name]() for name in options.contenders]
    if options.gguf:
        from llama_cpp_contender import LlamaCpp

        contenders += [LlamaCpp(path, torch.get_num_threads()) for path in options.gguf]
    return contenders


def run_round(
    contenders: Sequence[Contender], round_: int, options: argparse.Namespace, samples: Samples
) -> dict[str, float]:
    """Every contender at every workload; what the machine was like. Round 0 compiles and is not kept."""
    load, memory = os.getloadavg()[0], bandwidth.measure()
    num_tokens = options.tokens if round_ else min(WARM_UP, options.tokens)
    with busy(options.beside if round_ else 0):
        for key, spent in measure_round(contenders, round_, options.batches, num_tokens):
            if round_:
                samples[key].append(spent)
            figure = tokens_of(key[0], num_tokens) / spent.wall
            print(f"round {round_}: {key[0]}, {key[1]}: {figure:.1f} tokens/s", file=sys.stderr)
    return {"load": load, **memory}


@contextlib.contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """So many processes that compute all the time, until the block ends."""
    with contextlib.ExitStack() as stack:
        for _ in range(num_processes):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def measure_round(
    contenders: Sequence[Contender], round_: int, batches: Sequence[int], num_tokens: int
) -> Iterator[tuple[tuple[str, str], Spent]]:
    """((workload, contender), time); whoever goes first moves on with every round."""
    first = round_ % len(contenders)
    order = [*contenders[first:], *contenders[:first]]
    numbers = random.Random(round_)
    for batch in batches:
        prompts = random_prompts(numbers, batch, CONTEXT)
        for contender in order:
            yield (f"decode, batch {batch}", contender.name), contender.decode(prompts, num_tokens)
    prompts = random_prompts(numbers, 1, PREFILL)
    for contender in order:
        yield (f"prefill, {PREFILL} tokens", contender.name), contender.prefill(prompts)


def random_prompts(numbers: random.Random, count: int, length: int) -> Prompts:
    """New ids every time, so that no cache of prefixes can answer."""
    return [[numbers.randrange(100, VOCABULARY) for _ in range(length)] for _ in range(count)]


def tokens_of(workload: str, num_tokens: int) -> int:
    """Tokens that one measurement of a workload is about."""
    return PREFILL if workload.startswith("prefill") else int(workload.split()[-1]) * num_tokens


def report(
    options: argparse.Namespace,
    folder: Path,
    contenders: Sequence[Contender],
    samples: Samples,
    conditions: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """One JSON document that says what was measured, how and on what."""
    machine = {name: fact for name, fact in describe_machine().items() if not name.startswith("cache")}
    files = " ".join(path.name for path in options.gguf)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"benchmarks/cpu.py --dtype {options.dtype} --rounds {options.rounds}"
        f" --tokens {options.tokens} --threads {options.threads} --beside {options.beside}"
        f" --contenders {' '.join(options.contenders)}" + (f" --gguf {files}" if files else ""),
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "context": CONTEXT,
        "weight_bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        "machine": machine,
        "builds": {x.name: x.build for x in contenders if hasattr(x, "build")},
        "load_average": [round(row["load"], 2) for row in conditions],
        "bandwidth_gb_s": {kind: round(max(row[kind] for row in conditions), 1) for kind in ("read", "copy")},
        "results": [
            row_of(workload, contender, spent, options.tokens)
            for (workload, contender), spent in samples.items()
        ],
    }


def row_of(workload: str, contender: str, spent: Sequence[Spent], num_tokens: int) -> dict[str, Any]:
    """The figures of one workload and contender; milliseconds are a step's, and a prefill is one step."""
    steps = 1 if workload.startswith("prefill") else num_tokens
    figures = [tokens_of(workload, num_tokens) / one.wall for one in spent]
    return {
        "workload": workload,
        "contender": contender,
        "unit": "tokens/s",
        "median": round(statistics.median(figures), 1),
        "min": round(min(figures), 1),
        "max": round(max(figures), 1),
        "samples": [round(figure, 1) for figure in figures],
        "wall_ms": round(statistics.median(one.wall for one in spent) / steps * 1e3, 2),
        **steps_of([step for one in spent for step in one.steps]),
        "cpu_ms": round(statistics.median(one.cpu for one in spent) / steps * 1e3, 2),
    }


def steps_of(steps: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile of a step, in milliseconds; nothing where there was one alone."""
    if not steps:
        return {}
    last = sorted(steps)[min(len(steps) - 1, len(steps) * 99 // 100)]
    return {"step_ms": round(statistics.median(steps) * 1e3, 2), "step_p99_ms": round(last * 1e3, 2)}


if __name__ == "__main__":
    main()
