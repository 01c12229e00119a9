"""How fast scattered blocks of a KV cache go to pinned memory and back: what preemption could cost."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workloads

RESULTS = Path(__file__).resolve().parent / "results" / "host_copy_h100.json"
TOKENS, BLOCK_SIZE, NUM_BLOCKS = 2000, 16, 2048


def main() -> None:
    """Print a line for each shape, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    document: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    document["tokens"] = TOKENS
    for shape in workloads.SHAPES:
        document[shape] = measure(shape)
        print(shape, document[shape], flush=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def measure(shape: str) -> dict[str, Any]:
    """Both ways with all layers' blocks gathered first, so that one copy takes them."""
    config = workloads.SHAPES[shape]
    block = (BLOCK_SIZE, config["num_key_value_heads"], config["head_dim"])
    caches = [
        torch.randn(NUM_BLOCKS, *block, device="cuda").bfloat16()
        for _ in range(2 * config["num_hidden_layers"])
    ]
    ids = torch.randperm(NUM_BLOCKS, device="cuda")[: TOKENS // BLOCK_SIZE]
    pinned = torch.empty(len(caches), len(ids), *block, dtype=torch.bfloat16, pin_memory=True)

    def leave() -> None:
        pinned.copy_(torch.stack([cache.index_select(0, ids) for cache in caches]), non_blocking=True)

    def come_back() -> None:
        for cache, blocks in zip(caches, pinned.to("cuda", non_blocking=True), strict=True):
            cache.index_copy_(0, ids, blocks)

    size = pinned.numel() * pinned.element_size()
    figures: dict[str, Any] = {"bytes_per_token": size // TOKENS}
    for name, action in (("out", leave), ("in", come_back)):
        spent = seconds(action)
        figures[name] = {"ms": round(spent * 1e3, 3), "GBps": round(size / spent / 1e9, 1)}
    return figures


def seconds(action: Callable[[], None], repeats: int = 20) -> float:
    """Median of what it takes until the GPU is done."""
    times = []
    for _ in range(3 + repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
