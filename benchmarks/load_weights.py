"""How fast the weights of a checkpoint come to a device: as views of its files, and read ahead by threads.

Every way is run several times by turns, into the same tensors, with the files in the page cache. Exits with 1
where two ways give other bits.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import workloads
from gpu_sleep import checkpoint_of

from lamina.models.checkpoints import weights as reading
from lamina.models.checkpoints.loaded_weights import LoadedWeights
from lamina.models.checkpoints.read_ahead import BUFFER_BYTES, NUM_BUFFERS, ReadAhead
from lamina.models.config import read_model_config
from lamina.models.registry import find_model

RESULTS = Path(__file__).resolve().parent / "results" / "load_weights.json"


def main() -> None:
    """Print a line for each number of threads, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help=f"{', '.join(workloads.SHAPES)} (random weights), or a folder")
    parser.add_argument("--folder", type=Path, help="where that of a shape is written, else removed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, nargs="*", default=[0, 1, 2, 4, 8], help="0: views of files")
    parser.add_argument("--buffers", type=int, default=NUM_BUFFERS)
    parser.add_argument("--buffer-bytes", type=int, default=BUFFER_BYTES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found, is_same = measure(checkpoint_of(options.model, options.folder or Path(temporary)), options)
    document = {"date": time.strftime("%Y-%m-%d"), "settings": {k: str(v) for k, v in vars(options).items()}}
    options.output.write_text(json.dumps(document | {"ways": found}, indent=1) + "\n")
    sys.exit(not is_same)


def measure(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The figures of every number of threads, and whether all gave the same bits."""
    config, device = read_model_config(folder), torch.device(options.device)
    checkpoint = reading.read_checkpoint(find_model(config.architecture), config, folder)
    weights = LoadedWeights(checkpoint.schemes, dtype=torch.bfloat16, device=device)
    size = sum(tensor.nbytes for tensor in weights.by_name.values())
    seconds: dict[int, list[float]] = {threads: [] for threads in options.threads}
    sums: set[float] = set()
    for number in range(1 + options.repeats):  # the first brings the files into the page cache
        for threads, times in seconds.items():
            started = time.perf_counter()
            load(checkpoint, weights, threads, options)
            if number:
                times.append(time.perf_counter() - started)
            sums.add(sum(float(one.double().sum()) for one in weights.by_name.values()))
    found = {}
    for threads, times in seconds.items():
        median = statistics.median(times)
        found[f"{threads} threads"] = {"seconds": times, "GBps": round(size / median / 1e9, 2)}
        print(threads, "threads:", found[f"{threads} threads"], flush=True)
    return found, len(sums) == 1


def load(checkpoint: Any, weights: LoadedWeights, threads: int, options: argparse.Namespace) -> None:
    """Fill the weights anew; it includes to have the buffers, which torch has pinned once."""
    read_ahead = None
    if threads:
        sizes = {"num_buffers": options.buffers, "buffer_bytes": options.buffer_bytes}
        read_ahead = ReadAhead(weights.device, num_threads=threads, **sizes)
    elif weights.device.type == "cuda":
        sizes = {"num_buffers": 1, "buffer_bytes": 0}  # in which nothing fits
        read_ahead = ReadAhead(weights.device, **sizes)
    into: dict[str, Any] = {"dtype": weights.dtype, "device": weights.device, "into": weights}
    reading.load_weights(checkpoint, read_ahead=read_ahead, **into)
    if weights.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
