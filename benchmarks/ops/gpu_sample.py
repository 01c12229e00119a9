"""Sampling on one GPU, in CUDA graphs: each provider beside torch's argmax and the formula by a sort."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_attention import copy_bandwidth, seconds
from torch import Tensor

from lamina.custom_ops._shared.registry import select

RESULT = Path(__file__).resolve().parent.parent / "results" / "gpu_sample.json"
DEVICE, DTYPE, VOCAB = torch.device("cuda"), torch.bfloat16, 128_256
ROTATED_BYTES = 256 << 20  # that a graph goes through: several times the L2 cache
SPREADS = {"flat": 1.0, "peaked": 4.0}  # of the logits: random weights, and a nucleus of a few hundred tokens

Settings = list[dict[str, float]]  # one after another, over and over
CASES: dict[str, Settings] = {
    "greedy": [{"temperature": 0}],
    "temperature": [{}],
    "min_p 0.05": [{"min_p": 0.05}],
    "top_k 50": [{"top_k": 50}],
    "top_p 0.9": [{"top_p": 0.9}],
    "top_k 50, top_p 0.9": [{"top_k": 50, "top_p": 0.9}],
    "mixed": [{"temperature": 0}, {}, {"top_k": 50}, {"top_p": 0.9}],
}
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def arguments(batch: int, settings: Settings, spread: float, seed: int) -> tuple[Any, ...]:
    """Everything that the op takes."""
    rows = [OFF | settings[row % len(settings)] for row in range(batch)]
    dtypes = {"top_k": torch.int32}
    columns = [
        torch.tensor([row[name] for row in rows], dtype=dtypes.get(name, torch.float32), device=DEVICE)
        for name in OFF
    ]
    logits = (torch.randn(batch, VOCAB, device=DEVICE) * spread).to(DTYPE)
    seeds = torch.arange(batch, device=DEVICE) + 1000 * seed
    banned = torch.full((batch, 8), -1, dtype=torch.int32, device=DEVICE)
    out = torch.empty(batch, dtype=torch.int32, device=DEVICE)
    return logits, *columns, seeds, seeds * 7, banned, VOCAB, out


def time_sets(call: Callable[..., Any], sets: list[tuple[Any, ...]], repeats: int) -> float:
    """Seconds a call, over all input sets."""
    return seconds([lambda inputs=inputs: call(*inputs) for inputs in sets], repeats)


def torch_argmax(logits: Tensor, *others: Any) -> None:
    """What greedy sampling costs in torch."""
    torch.argmax(logits, dim=-1)


def measure(name: str, batch: int, spread: str, contenders: list[str], repeats: int) -> dict[str, Any]:
    """Seconds of every contender."""
    num_bytes = batch * VOCAB * DTYPE.itemsize
    num_sets = max(2, -(-ROTATED_BYTES // num_bytes))
    sets = [arguments(batch, CASES[name], SPREADS[spread], seed) for seed in range(num_sets)]
    row: dict[str, Any] = {"case": name, "logits": spread, "batch": batch, "bytes": num_bytes}
    row["seconds"] = {}
    for contender in contenders:
        if contender == "argmax":
            if name == "greedy":
                row["seconds"][contender] = time_sets(torch_argmax, sets, repeats)
        else:
            call = select("sample", device=DEVICE, dtype=DTYPE, provider=contender).call
            some = sets[:2] if contender == "reference" else sets  # hundreds of times slower
            row["seconds"][contender] = time_sets(call, some, 3 if contender == "reference" else repeats)
    return row


def line(row: dict[str, Any], bandwidth: float) -> str:
    """One line of the table: microseconds, and the time that reading the logits once would take over it."""
    cells = [
        f"{name} {taken * 1e6:8.2f} us {row['bytes'] / taken / bandwidth:4.0%}"
        for name, taken in row["seconds"].items()
    ]
    return f"{row['case']:20}{row['logits']:7}{row['batch']:4}  " + "  ".join(cells)


def main() -> None:
    """Print a line a case as it is known, then write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--logits", nargs="+", default=list(SPREADS), choices=list(SPREADS))
    parser.add_argument("--contenders", nargs="+", default=["cuda", "triton", "argmax", "reference"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, {VOCAB} bf16 logits a row")
    results = []
    for name in options.cases:
        for spread in options.logits:
            for batch in options.batch:
                results.append(measure(name, batch, spread, options.contenders, options.repeats))
                print(line(results[-1], bandwidth), flush=True)
                torch.cuda.empty_cache()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    document = {"machine": machine, "vocab": VOCAB, "copy_bytes_per_s": bandwidth, "results": results}
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
