"""Preempted requests that come back by copying from the host, against by computing again.

First what it takes to copy blocks out and in, and to compute as many tokens; then a workload that has so
small a cache that it is preempted all the time, with slots on the host and without.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workloads

from lamina import Runtime, SamplingParams
from lamina.runtime.protocol.scheduler_output import Copies

RESULTS = Path(__file__).resolve().parent / "results" / "swap.json"
HOST_BYTES = None if torch.cuda.is_available() else 1 << 30  # None: what Lamina gives unasked
NUM_IDS = 300  # of the tokens in prompts, so that every model has them


def main() -> None:
    """Print a line for each figure, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="1b, 8b (their shapes, random weights), or a model folder or file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", nargs="*", type=int, default=[64, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=1024)
    parser.add_argument("--fit", type=int, default=24, help="whole requests that the cache holds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    document: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(options).items()}}
    if torch.cuda.is_available():
        document["gpu"] = torch.cuda.get_device_name()
    with open_runtime(options, max(options.tokens) + 1, HOST_BYTES) as runtime:
        document["alone"] = [alone(runtime, count) for count in options.tokens]
    for name, swap_bytes in (("computed again", 0), ("copied", HOST_BYTES)):
        document[name] = preempted(options, swap_bytes)
        print(name, document[name], flush=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def open_runtime(options: argparse.Namespace, capacity: int, swap_bytes: int | None) -> Runtime:
    """With a cache for so many tokens, and at least for one request."""
    model: str | Path = options.model
    settings: dict[str, Any] = {}
    if options.model in workloads.SHAPES:
        model = workloads.write_config(options.model, Path("/tmp/lamina-shapes") / options.model)
        settings = {"load_format": "dummy", "dtype": "bfloat16"}
    size = 64 if torch.cuda.is_available() else 16
    return Runtime.from_pretrained(
        model,
        device=options.device,
        block_size=size,
        max_model_len=max(max(options.tokens) + 8, options.prompt + options.answer),
        num_kv_blocks=2 + -(-capacity // size),
        swap_bytes=swap_bytes,
        **settings,
    )


def alone(runtime: Runtime, count: int) -> dict[str, float]:
    """Milliseconds to copy so many tokens out and in, and to compute them in one step with nobody else."""
    host = runtime._open.runner.host_blocks
    assert host is not None
    blocks = range(1, 1 + count // runtime.stats()["resolved"]["block_size"])
    swap_out = Copies(tuple((block, block - 1) for block in blocks), ())
    swap_in = Copies((), tuple((block - 1, block) for block in blocks))
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    prompts = iter(workloads.prompts(6, count, count))

    def compute() -> None:
        runtime.generate([[token % NUM_IDS for token in next(prompts)]], params, cache_salt=str(time.time()))

    with torch.inference_mode():
        first = seconds(lambda: host.copy(swap_out), 1)
        figures = {
            "first out": first,
            "out": seconds(lambda: host.copy(swap_out)),
            "in": seconds(lambda: host.copy(swap_in)),
        }
    figures["computed"] = seconds(compute)
    measured = {"tokens": count, **{name: round(1e3 * value, 3) for name, value in figures.items()}}
    print(measured, flush=True)
    return measured


def seconds(action: Callable[[], None], repeats: int = 5) -> float:
    """Median of what it takes until the device is done."""
    times = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        action()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def preempted(options: argparse.Namespace, swap_bytes: int | None) -> dict[str, Any]:
    """Seconds of each round after one that warms up, with what the last one did."""
    capacity = options.fit * (options.prompt + options.answer)
    params = SamplingParams(max_tokens=options.answer, temperature=0, ignore_eos=True, detokenize=False)
    with open_runtime(options, capacity, swap_bytes) as runtime:
        spent = []
        for number in range(1 + options.rounds):
            prompts = workloads.prompts(options.requests, options.prompt, number)
            before = runtime.stats()
            started = time.perf_counter()
            runtime.generate([[token % NUM_IDS for token in prompt] for prompt in prompts], params)
            spent.append(time.perf_counter() - started)
        after = runtime.stats()
    block, swap = after["resolved"]["block_size"], after["swap"]
    return {
        "seconds": [round(each, 3) for each in spent[1:]],
        "preemptions": after["preemptions"] - before["preemptions"],
        "tokens_out": block * (swap["out"] - before["swap"]["out"]),
        "tokens_in": block * (swap["in"] - before["swap"]["in"]),
        "host_bytes": swap["host_bytes"],
    }


if __name__ == "__main__":
    main()
