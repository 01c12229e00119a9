"""What a decode step costs more where its worker has a process of its own, turn by turn in one run.

The same small model is served twice, by this process and by a spawned worker. Each round steps both the same
number of times, so that a machine that slows down slows both; what counts is the difference of the medians.
The device's own work is the same in both, and one thread computes it, so the rest is the host's: the plan
sent, a process woken, the answer sent, this process woken. With two steps in flight all that happens while
the worker computes.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import workloads

from lamina import Runtime, SamplingParams
from lamina.cli.info import describe_machine
from lamina.runtime.startup import engine_builder

RESULTS = Path(__file__).resolve().parent / "results" / "executor_cost.json"
CONFIG = workloads.COMMON | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}
EXECUTORS = ("uniproc", "multiproc")
WARM_UP = 50


def main() -> None:
    """Print microseconds a step for each number of requests, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batches", nargs="*", type=int, default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="of each in a round")
    parser.add_argument(
        "--depths", nargs="*", type=int, default=[1, 2], help="steps in flight: 1 as on CPUs, 2 as on GPUs"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = {name: describe_machine()[name] for name in ("cpu", "cores", "python", "versions")}
    document: dict[str, Any] = {"rounds": options.rounds, "steps": options.steps, "machine": machine}
    for depth, batch in itertools.product(options.depths, options.batches):
        engine_builder.DEPTHS["cpu"] = depth
        name = f"{batch} requests, {depth} in flight"
        document[name] = figures = measure(batch, options.rounds, options.steps)
        print(f"{name}: {figures}", flush=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def measure(batch: int, rounds: int, steps: int) -> dict[str, float]:
    """Medians of a step's microseconds by executor, and their difference."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        served = {name: open_runtime(folder, name, batch) for name in EXECUTORS}
        try:
            seconds: dict[str, list[float]] = {name: [] for name in EXECUTORS}
            streams = [ask(runtime, batch, WARM_UP + rounds * steps) for runtime in served.values()]
            for _ in range(WARM_UP):
                for runtime in served.values():
                    runtime._client.step()
            for number in range(rounds):
                for name in EXECUTORS[:: 1 if number % 2 else -1]:
                    seconds[name] += times(served[name], steps)
            del streams
        finally:
            for runtime in served.values():
                runtime.close()
    medians = {name: round(1e6 * statistics.median(each), 1) for name, each in seconds.items()}
    return medians | {"difference": round(medians["multiproc"] - medians["uniproc"], 1)}


def open_runtime(folder: str, executor: Any, batch: int) -> Runtime:
    """A model without a tokenizer and with made-up weights."""
    return Runtime.from_pretrained(
        folder, load_format="dummy", device="cpu", executor=executor, max_num_seqs=batch, num_kv_blocks=40_000
    )


def ask(runtime: Runtime, batch: int, num_steps: int) -> Any:
    """Have as many requests under way, each for longer than is measured; returns what keeps them so."""
    params = SamplingParams(temperature=0, max_tokens=num_steps + 100, ignore_eos=True)
    streams = [runtime.stream([1 + number % 500], params) for number in range(batch)]
    for stream in streams:
        next(stream)
    return streams


def times(runtime: Runtime, steps: int) -> list[float]:
    """The seconds of each of so many steps."""
    found = []
    for _ in range(steps):
        started = time.perf_counter()
        runtime._client.step()
        found.append(time.perf_counter() - started)
    return found


if __name__ == "__main__":
    main()
