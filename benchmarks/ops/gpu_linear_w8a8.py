"""Projections, norms and gates of a decode step in one byte on a GPU, in one CUDA graph, and each alone."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_attention import copy_bandwidth, seconds
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from autotune_gemms import projections
from workloads import SHAPES

from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8, group_of, num_groups
from lamina.custom_ops.linear import autotune
from lamina.custom_ops.linear.choices import BYTES, device_name_of, sites_of
from lamina.custom_ops.linear_w8a8._composed import linear_w8a8 as composed
from lamina.custom_ops.scaled_linear import _cuda as scaled

RESULT = Path(__file__).resolve().parent.parent / "results" / "gpu_linear_w8a8.json"
DEVICE, DTYPE, EPS = torch.device("cuda"), torch.bfloat16, 1e-5
OPS = torch.ops.lamina
NAMES = ("qkv", "o", "gate_up", "down")
MAX_FLOPS = 1.4e15  # a large GEMM in one byte


@dataclass(frozen=True)
class Weight:
    """A projection: [out, in] in one byte and the scales of its rows, or of groups of 128 columns."""

    values: Tensor
    scale: Tensor


def make_layers(shape: str, weights: str) -> list[dict[str, Weight]]:
    """Random weights of a shape."""

    def weight(n: int, k: int) -> Weight:
        kept, grouped = INT8 if weights == "int8" else FP8, weights == "fp8_block"
        values = torch.randn(n, k, device=DEVICE, dtype=DTYPE).mul_(30).clamp_(-127, 127).to(kept)
        scale = torch.rand((n, num_groups(k)) if grouped else (n,), device=DEVICE) / (30 * k**0.5)
        return Weight(values, scale)

    sizes = dict(zip(NAMES, projections(shape), strict=True))
    return [
        {name: weight(*size) for name, size in sizes.items()}
        for _ in range(SHAPES[shape]["num_hidden_layers"])
    ]


Multiply = Callable[..., Tensor]


def step(layers: list[dict[str, Weight]], x: Tensor, norm: Tensor, multiply: Multiply) -> Tensor:
    """As the passes leave a step: every activation is quantized where it is made, but attention's output."""
    residual, hidden, attended = x, x.shape[1], x
    form = group_of(layers[0]["o"].scale), layers[0]["o"].values.dtype
    for layer in layers:
        o = OPS.linear_w8a8.default(attended, layer["o"].values, layer["o"].scale)
        normed, scale, residual = OPS.add_rms_norm_quantized.default(o, residual, norm, EPS, *form)
        gate_up = multiply(normed, scale, layer["gate_up"])
        gated, scale = OPS.act_and_mul_quantized.default(gate_up, False, *form)
        down = multiply(gated, scale, layer["down"])
        normed, scale, residual = OPS.add_rms_norm_quantized.default(down, residual, norm, EPS, *form)
        attended = multiply(normed, scale, layer["qkv"])[:, :hidden]
    return attended


def gemms(layers: list[dict[str, Weight]], given: dict[str, Any], multiply: Multiply) -> Tensor:
    """The GEMMs alone, of activations that are there."""
    for layer in layers:
        out = [multiply(*given[name], layer[name]) for name in NAMES]
    return out[-1]


def ours(x: Tensor, x_scale: Tensor, weight: Weight) -> Tensor:
    """As kernels are chosen now."""
    out: Tensor = OPS.scaled_linear.default(x, x_scale, weight.values, weight.scale, None, DTYPE)
    return out


def library(x: Tensor, x_scale: Tensor, weight: Weight) -> Tensor:
    """torch's GEMM in FP8."""
    return scaled.library(x, x_scale, weight.values, weight.scale, None, DTYPE)


def quantized_rows(batch: int, weight: Weight, group: int) -> tuple[Tensor, Tensor]:
    """Random activations as a projection takes them."""
    x = torch.randn(batch, weight.values.shape[1], device=DEVICE, dtype=DTYPE)
    both: tuple[Tensor, Tensor] = OPS.quantize_rows.default(x, group, weight.values.dtype)
    return both


def measure(layers: list[dict[str, Weight]], batch: int, bandwidth: float, repeats: int) -> dict[str, Any]:
    """Seconds of a step, of its GEMMs, of each GEMM alone; and the least there could be."""
    hidden = layers[0]["qkv"].values.shape[1]
    x = torch.randn(batch, hidden, device=DEVICE, dtype=DTYPE)
    norm = torch.ones(hidden, device=DEVICE, dtype=DTYPE)
    group = group_of(layers[0]["qkv"].scale)
    given = {name: quantized_rows(batch, layers[0][name], group) for name in NAMES}
    is_in_library = scaled.has_library(batch, layers[0]["o"].values, layers[0]["o"].scale, DTYPE)
    ways = {"ours": ours} | ({"library": library} if is_in_library else {})
    taken = {}
    for name, multiply in ways.items():
        taken[f"step, {name}"] = seconds([partial(step, layers, x, norm, multiply)], repeats)
        taken[f"GEMMs, {name}"] = seconds([partial(gemms, layers, given, multiply)], repeats)
    for name, linear in (("o of 16 bits", OPS.linear_w8a8.default), ("o in two launches", composed)):
        calls = [partial(linear, x, layer["o"].values, layer["o"].scale) for layer in layers]
        taken[name] = seconds(calls, repeats) * len(layers)
    for name in NAMES:
        calls = [partial(ours, *given[name], layer[name]) for layer in layers]
        taken[name] = seconds(calls, repeats)
    num_bytes = sum(weight.values.numel() for layer in layers for weight in layer.values())
    floor = {"bytes": num_bytes / bandwidth, "operations": 2.0 * num_bytes * batch / MAX_FLOPS}
    sizes = {name: layers[0][name].values.numel() for name in NAMES}
    return {"batch": batch, "seconds": taken, "floor_seconds": floor, "bytes": num_bytes, "sizes": sizes}


def line(row: dict[str, Any], bandwidth: float) -> str:
    """One line of the table: ms a step, and of each GEMM microseconds, GB/s and the share of a copy's."""
    taken = row["seconds"]
    whole = [f"{name} {took * 1e3:.3f}" for name, took in taken.items() if name not in NAMES]
    rates = {name: row["sizes"][name] / taken[name] for name in NAMES}
    each = [
        f"{name} {taken[name] * 1e6:.1f} us {rate / 1e9:.0f} GB/s {rate / bandwidth:.0%}"
        for name, rate in rates.items()
    ]
    floor = "/".join(f"{least * 1e3:.3f}" for least in row["floor_seconds"].values())
    return f"batch {row['batch']:3}, floor {floor} ms: {'; '.join(whole)}\n    {'; '.join(each)}"


def autotuned(shape: str, batches: list[int], weights: str) -> None:
    """Adopt measurements of the projections for these numbers of rows."""
    sites = [site for size in projections(shape) for site in sites_of("linear", *size, "bfloat16", weights)]
    for entry in autotune.autotune([site for site in sites if site.num_tokens in batches], DEVICE, DTYPE):
        print(f"  {entry.site}: {entry.kernel} {entry.microseconds:.1f} us, otherwise {entry.otherwise:.1f}")


def main() -> None:
    """Print a line a size as it is known, then write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["8b"], choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--weights", default="fp8", choices=BYTES)
    parser.add_argument("--autotune", action="store_true", help="measure every configuration first")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    gpu = device_name_of(torch.device("cuda", 0), DTYPE)
    print(f"{gpu}, copy {bandwidth / 1e12:.2f} TB/s; ms a step", flush=True)
    results: dict[str, list[dict[str, Any]]] = {}
    for shape in options.shapes:
        if options.autotune:
            autotuned(shape, options.batches, options.weights)
        layers = make_layers(shape, options.weights)
        for batch in options.batches:
            row = measure(layers, batch, bandwidth, options.repeats)
            results.setdefault(shape, []).append(row)
            print(f"{shape} {line(row, bandwidth)}", flush=True)
        del layers
        torch.cuda.empty_cache()
    machine = {"gpu": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    document = {"machine": machine, "copy_bytes_per_s": bandwidth, "results": results}
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
