"""Many short requests on a cache that is too small for them, some closed early or out of time: what is left?

A model of a few thousand weights serves, so that what takes time and memory is the runtime itself.
"""

import argparse
import gc
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import workloads

from lamina import Runtime, SamplingParams, StreamDelta
from lamina.cli.info import describe_machine

RESULTS = Path(__file__).resolve().parent / "results" / "soak_cpu.json"
MODEL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LIVE = 40  # requests at once
BLOCKS = {"block_size": 1, "num_kv_blocks": 60, "max_model_len": 32, "max_num_seqs": 32, "swap_bytes": 4096}
GROWTH = 1.05  # of memory between a tenth of the requests and all of them, at most


def main() -> None:
    """Print a line for each tenth of the requests, write JSON, and fail where a block or memory was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    workloads.SHAPES["soak"] = MODEL
    folder = workloads.write_config("soak", Path("/tmp/lamina-shapes/soak"))
    settings: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "compile": False, **BLOCKS}
    with Runtime.from_pretrained(folder, **settings) as runtime:
        document = soak(runtime, options.requests)
    machine = {name: describe_machine()[name] for name in ("cpu", "cores", "python", "versions")}
    options.output.write_text(json.dumps({"machine": machine, **document}, indent=1) + "\n")
    resident = document["resident_mib"]
    held = document["blocks"]["used"] + document["swap"]["used"]
    if held or resident[-1] > GROWTH * resident[0]:
        raise SystemExit(f"something was kept: {document}")


def soak(runtime: Runtime, num_requests: int) -> dict[str, Any]:
    """Serve so many requests; what they did, and the memory of the process after each tenth of them."""
    source, resident, started = random.Random(0), [], time.perf_counter()
    ends: dict[str, int] = {"length": 0, "stop": 0, "abort": 0, "closed": 0}
    live: list[Iterator[StreamDelta]] = []
    for number in range(1, num_requests + 1):
        live.append(request(runtime, source))
        while len(live) >= LIVE or (live and number == num_requests):
            advance(live, source, ends)
        if number % (num_requests // 10) == 0:
            while live:
                advance(live, source, ends)
            gc.collect()
            resident.append(resident_mib())
            print(f"{number} requests, {time.perf_counter() - started:.0f} s, {resident[-1]} MiB", flush=True)
    stats = runtime.stats()
    return {
        "requests": num_requests,
        "ends": ends,
        "preemptions": stats["preemptions"],
        "prefix_cache": stats["prefix_cache"],
        "swap": stats["swap"],
        "blocks": stats["blocks"],
        "resident_mib": resident,
        "seconds": round(time.perf_counter() - started, 1),
    }


def request(runtime: Runtime, source: random.Random) -> Iterator[StreamDelta]:
    """A prompt of some tokens, which may begin as another does, and an answer of some more."""
    begin = [source.randrange(3, 32)] * source.choice([0, 4, 8])
    prompt = begin + [source.randrange(3, 32) for _ in range(source.randint(1, 6))]
    params = SamplingParams(
        max_tokens=source.choice([1, 2, 3, 16]),
        temperature=source.choice([0.0, 1.0]),
        seed=source.randrange(1000),
    )
    timeout = source.choice([None, None, 1e6, 1e-6])
    return runtime.stream(prompt, params, priority=source.randint(-1, 1), timeout=timeout)


def advance(live: list[Iterator[StreamDelta]], source: random.Random, ends: dict[str, int]) -> None:
    """A piece of anybody's answer; one in fifty is closed in place of that."""
    stream = live[source.randrange(len(live))]
    if source.random() < 0.02:
        stream.close()  # type: ignore[attr-defined]
        live.remove(stream)
        ends["closed"] += 1
    elif reason := next(stream).finish_reason:
        live.remove(stream)
        ends[reason] += 1


def resident_mib() -> float:
    """Memory of this process that is in RAM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith("VmRSS"))
    return round(int(size) / 1024, 1)


if __name__ == "__main__":
    main()
