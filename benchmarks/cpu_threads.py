"""Decode on a CPU by every number of threads, beside what its cores read and beside transformers.

One process measures all numbers in turn, in rounds, until its time is over; what has been measured by then is
printed and written. A model that is made up (--shape) is written to a folder first, for both contenders.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bandwidth
import torch
import workloads
from contenders import Contender, Lamina, Transformers
from cpu import at_least_one, random_prompts
from safetensors.torch import save_file

from lamina.cli.info import describe_machine

RESULTS = Path(__file__).resolve().parent / "results"
WARM_UP = 4  # steps of each measurement that are left out: CPU call graphs are captured and checked in them
REPEATED = (1 << 22) + 1  # random numbers, from which all weights are made

Key = tuple[int, int, str]  # threads, sequences, contender


def main() -> None:
    """Measure until the time is over, print a line a figure, write benchmarks/results/NAME.json."""
    options = parse_arguments()
    ends = time.perf_counter() + options.seconds
    torch.set_num_threads(max(options.threads))
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_weights(options.shape, options.layers, Path(scratch))
        weights = weight_bytes(folder)
        contenders = make_contenders(options, folder)
    print(f"started with {ends - time.perf_counter():.0f} s left", flush=True)
    steps: dict[Key, list[float]] = defaultdict(list)
    reads: dict[int, float] = {}
    for key, found in measure(options, contenders, weights, reads, ends):
        steps[key] += found
        print(line(row_of(key, steps[key], weights, reads)), flush=True)
    write(options, steps, weights, reads)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=workloads.SHAPES, default="1b")
    parser.add_argument("--layers", type=at_least_one, help="fewer than the shape has, to try this out")
    parser.add_argument("--threads", type=at_least_one, nargs="*", default=(16, 8, 4, 2, 1))
    parser.add_argument("--batches", type=at_least_one, nargs="*", default=(1, 32))
    parser.add_argument("--context", type=at_least_one, default=16, help="tokens of a prompt")
    parser.add_argument("--tokens", type=at_least_one, default=8, help="measured a sequence, after 4 steps")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="if there is time")
    parser.add_argument("--seconds", type=float, default=90, help="after which nothing new is begun")
    parser.add_argument("--quantization", help="of Lamina's weights")
    parser.add_argument("--name", default="cpu_threads", help="name of the result file")
    return parser.parse_args()


def write_weights(shape: str, layers: int | None, folder: Path) -> Path:
    """A checkpoint in bfloat16 of random weights, quickly: norms of one, all else of deviation 0.02."""
    from transformers import AutoConfig, AutoModelForCausalLM

    workloads.write_config(shape, folder)
    described = json.loads((folder / "config.json").read_text())
    described["num_hidden_layers"] = layers or described["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(described))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    numbers = (torch.randn(REPEATED, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    tensors = {
        name: torch.ones(tensor.shape, dtype=torch.bfloat16) if tensor.dim() == 1 else fill(tensor, numbers)
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and described["tie_word_embeddings"])
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fill(like: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The numbers, over and over; their count has no factor in common with any size, so that rows differ."""
    times = -(-like.numel() // len(numbers))
    return numbers.repeat(times)[: like.numel()].view(like.shape)


def weight_bytes(folder: Path) -> int:
    """Bytes that a decode step reads; a table that is tied to the LM head is read as that, and once."""
    described = json.loads((folder / "config.json").read_text())
    table = 0 if described["tie_word_embeddings"] else 2 * described["vocab_size"] * described["hidden_size"]
    return (folder / "model.safetensors").stat().st_size - table


def make_contenders(options: argparse.Namespace, folder: Path) -> list[Contender]:
    batch, length = max(options.batches), options.context + options.tokens + WARM_UP + 1
    lamina = Lamina(
        "lamina",
        str(folder),
        batch,
        batch * options.context,
        device="cpu",
        dtype="bfloat16",
        max_model_len=-(-length // 64) * 64,
        quantization=options.quantization,
    )
    tokens = options.tokens + WARM_UP
    return [lamina, Transformers("transformers", folder, "bfloat16", tokens, compiled=False)]


def measure(
    options: argparse.Namespace,
    contenders: list[Contender],
    weights: int,
    reads: dict[int, float],
    ends: float,
) -> Iterator[tuple[Key, list[float]]]:
    """Seconds of each step; `reads` gets the GB/s that so many threads read. Contenders take turns."""
    for round_ in range(options.rounds):
        for threads in options.threads:
            torch.set_num_threads(threads)
            reads[threads] = max(reads.get(threads, 0.0), bandwidth.measure_read(weights, 2))
            for batch in options.batches:
                prompts = random_prompts(random.Random(round_), batch, options.context)
                for contender in contenders:
                    if time.perf_counter() > ends:
                        return
                    spent = contender.decode(prompts, options.tokens + WARM_UP)
                    yield (threads, batch, contender.name), list(spent.steps[WARM_UP:])


def row_of(key: Key, steps: list[float], weights: int, reads: dict[int, float]) -> dict[str, Any]:
    """The figures of one contender; the share is of what as many threads read in the time of a step."""
    threads, batch, name = key
    step = statistics.median(steps)
    rate = weights / step / 1e9
    return {
        "threads": threads,
        "batch": batch,
        "contender": name,
        "step_ms": round(step * 1e3, 2),
        "best_ms": round(min(steps) * 1e3, 2),
        "tokens_s": round(batch / step, 1),
        "weights_gb_s": round(rate, 1),
        "read_gb_s": round(reads[threads], 1),
        "share_of_read": round(rate / reads[threads], 3),
        "steps": len(steps),
    }


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    return (
        f"{row['threads']:3d} threads, batch {row['batch']:3d}, {row['contender']:14}"
        f"{row['step_ms']:9.2f} ms a step ({row['best_ms']:.2f} at best), {row['tokens_s']:8.1f} tokens/s,"
        f" weights at {row['weights_gb_s']:.1f} GB/s, {100 * row['share_of_read']:.0f} % of reading"
    )


def write(
    options: argparse.Namespace, steps: dict[Key, list[float]], weights: int, reads: dict[int, float]
) -> None:
    """The result file, ordered by threads."""
    machine = {name: fact for name, fact in describe_machine().items() if not name.startswith("cache")}
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "shape": options.shape,
        "layers": options.layers,
        "quantization": options.quantization,
        "context": options.context,
        "weight_bytes": weights,
        "machine": machine,
        "results": [row_of(key, steps[key], weights, reads) for key in sorted(steps)],
    }
    (RESULTS / f"{options.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    for row in document["results"]:
        print(line(row))


if __name__ == "__main__":
    main()
