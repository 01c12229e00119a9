"""Contenders for one op timed in interleaved rounds, and a table and a JSON file of the result."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bandwidth

Call = Callable[[], object]
RUN_SECONDS = 0.005
REST_SECONDS = 0.02  # OpenMP's threads turn for 8.5 ms behind torch's work


def arguments(op: str) -> argparse.Namespace:
    """Command-line options of every op's benchmark."""
    parser = argparse.ArgumentParser(description=f"Measure lamina::{op} on the CPU beside what torch offers.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def race(contenders: Mapping[str, Call], rounds: int) -> dict[str, dict[str, float]]:
    """Best and median microseconds of each, every round running all of them, so that noise hits all alike.

    Each is called for RUN_SECONDS, as a step calls it for layer after layer; before that OpenMP's threads
    come to rest.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(rounds):
        for name, call in contenders.items():
            time.sleep(REST_SECONDS)
            one_call = _seconds(call, 1)
            num_calls = max(1, int(RUN_SECONDS / one_call))
            times[name].append(_seconds(call, num_calls) / num_calls * 1e6)
    return {
        name: {"best": round(min(all_), 1), "median": round(statistics.median(all_), 1)}
        for name, all_ in times.items()
    }


def _seconds(call: Call, num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return time.perf_counter() - start


def report(op: str, options: argparse.Namespace, cases: list[dict[str, Any]]) -> None:
    """Print one line a case and contender; write the file where one is wanted."""
    memory = bandwidth.measure()
    print(f"{op}, {options.threads} threads, memory reads {memory['read']:.1f} GB/s")
    for case in cases:
        for name, time_us in case["microseconds"].items():
            rate = case["bytes"] / time_us["best"] / 1e3
            figures = f"{time_us['best']:10.1f} best {time_us['median']:10.1f} median us {rate:8.1f} GB/s"
            print(f"{case['name']:32} {name:24} {figures}")
    if options.output is not None:
        facts = {
            "op": op,
            "load": round(
                os.getloadavg()[0], 1
            ),  # of the whole machine; far above threads, trust ratios only
            "torch": torch.__version__,
            "machine": platform.machine(),
            "threads": options.threads,
        }
        result = facts | {"memory_gb_per_s": memory, "cases": cases}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
