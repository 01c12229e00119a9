"""Gate and up of a prompt on one GPU: torch's GEMM, then the gate, and the persistent kernel with both."""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from workloads import SHAPES

from lamina.common.errors import KernelLaunchError
from lamina.custom_ops.linear.choices import GemmConfig, persistent_stages
from lamina.custom_ops.linear_silu_and_mul import _cuda as with_gate

OPS, DEVICE, DTYPE = torch.ops.lamina, torch.device("cuda"), torch.bfloat16
CONFIGS = [GemmConfig(2, 256, 2, 1, persistent_stages(2, 256), 66), GemmConfig(2, 256, 1, 2, 4, 66)]
RESULT = Path(__file__).resolve().parent.parent / "results" / "gpu_gated_prefill.json"
LAYERS = 4  # of weights, so that they come from device memory


def main() -> None:
    """Print a line a size, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["8b", "1b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[384, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for shape in options.shapes:
        hidden, inner = SHAPES[shape]["hidden_size"], SHAPES[shape]["intermediate_size"]
        weights = [
            torch.randn(2 * inner, hidden, device=DEVICE, dtype=DTYPE) / hidden**0.5 for _ in range(LAYERS)
        ]
        for tokens in options.tokens:
            x = torch.randn(tokens, hidden, device=DEVICE, dtype=DTYPE)
            found[f"{shape} {tokens}"] = figures = race(x, weights, options.rounds)
            print(shape, tokens, {name: round(us, 1) for name, us in figures.items()}, flush=True)
            options.output.write_text(json.dumps(found, indent=1) + "\n")


def by_library(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = OPS.silu_and_mul.default(torch.nn.functional.linear(x, weight))
    return result


def race(x: Tensor, weights: list[Tensor], rounds: int) -> dict[str, float]:
    """Microseconds of each way for one layer, medians of rounds in which all take turns."""
    ways = {"library": by_library} | {
        "/".join(map(str, config)): lambda x, weight, config=config: with_gate.launch(x, weight, None, config)
        for config in CONFIGS
    }
    expected = by_library(x, weights[0]).float()
    taken: dict[str, list[float]] = {}
    for number in range(rounds + 2):
        for name, way in ways.items():
            try:
                microseconds = timed(lambda way=way: [way(x, weight) for weight in weights]) / LAYERS
            except KernelLaunchError as error:
                print(name, error, flush=True)
                continue
            if number >= 2:
                taken.setdefault(name, []).append(microseconds)
    for name, way in ways.items():
        if name in taken:
            assert (way(x, weights[0]).float() - expected).abs().max() < 0.1, name
    return {name: statistics.median(times) for name, times in taken.items()}


def timed(call: Any) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


if __name__ == "__main__":
    with torch.inference_mode():
        main()
