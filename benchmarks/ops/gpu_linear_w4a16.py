"""lamina::linear_w4a16 on one GPU, in CUDA graphs: the projections of a model beside bfloat16."""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_attention import copy_bandwidth, seconds
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from workloads import SHAPES

import lamina.custom_ops  # noqa: F401  registers the ops
from lamina.common.errors import KernelLaunchError
from lamina.custom_ops.linear.choices import (
    Entry,
    GemmConfig,
    Kind,
    adopt,
    bucket_of,
    device_name_of,
    processors_of,
)
from lamina.custom_ops.linear_w4a16 import _cuda
from lamina.custom_ops.linear_w4a16.configs import candidates, default_config, site_of
from lamina.custom_ops.linear_w4a16.layout import columns_of
from lamina.custom_ops.silu_and_mul.reference import silu_and_mul

RESULT = Path(__file__).resolve().parent.parent / "results" / "gpu_linear_w4a16.json"
DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16
OPS = torch.ops.lamina
ROTATED_BYTES = 200 << 20  # of weights that a graph goes through: several times the L2 cache


@dataclass(frozen=True)
class Matrix:
    """The parts of one projection, shuffled; random bits are as good as any."""

    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    group: int

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.weight, self.scale, self.zero) if part is not None)


def make(n: int, k: int, group: int, *, zero: bool, bits: int = 4) -> Matrix:
    """Random parts of [n, k]."""
    groups = 1 if group < 0 else k // group
    scale = (torch.rand(n, groups, device=DEVICE) / (4 * k**0.5)).to(DTYPE)
    weight = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, device=DEVICE)
    weight = weight if bits == 4 else weight.view(torch.int8)
    return Matrix(weight, scale, torch.randn_like(scale) / k**0.5 if zero else None, group)


def projections(shape: str) -> dict[str, tuple[int, int]]:
    """[n, k] of the four projections of a layer."""
    sizes = SHAPES[shape]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    heads = sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"]
    qkv = heads * sizes["head_dim"], hidden
    return {"qkv": qkv, "o": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}


def microseconds(
    x: Tensor, config: GemmConfig, matrices: list[Matrix], *, gated: bool, repeats: int
) -> float:
    """Median time of one launch, going through all matrices."""
    calls = [
        partial(_cuda.launch, x, m.weight, m.scale, m.zero, None, m.group, config, gated=gated)
        for m in matrices
    ]
    return seconds(calls, repeats) * 1e6


def library(x: Tensor, n: int, k: int, *, gated: bool, repeats: int) -> float:
    """The same of weights in bfloat16 by the library, with a gate of its own launch."""
    count = max(2, -(-ROTATED_BYTES // (n * k * DTYPE.itemsize)))
    weights = [torch.randn(n, k, device=DEVICE, dtype=DTYPE) for _ in range(count)]
    gate = torch.ops.lamina.silu_and_mul.default

    def call(weight: Tensor) -> Tensor:
        out = F.linear(x, weight)
        result: Tensor = gate(out) if gated else out
        return result

    return seconds([partial(call, weight) for weight in weights], repeats) * 1e6


def of_projection(
    name: str, n: int, k: int, batch: int, options: argparse.Namespace, bandwidth: float
) -> dict[str, Any]:
    """The default configuration, the fastest of all if they are asked for, and the library."""
    gated, group = name == "gate_up", options.group
    kind, bucket = ("gated" if gated else "linear"), bucket_of(batch)
    assert bucket is not None
    kept: dict[str, Any] = {"zero": options.zero, "bits": options.bits}
    one = make(n, k, group, **kept)
    count = max(2, -(-ROTATED_BYTES // one.num_bytes))
    matrices = [one, *(make(n, k, group, **kept) for _ in range(count - 1))]
    x = torch.randn(batch, k, device=DEVICE, dtype=DTYPE)
    default = default_config(kind, bucket, n, k, group, processors_of(DEVICE), options.bits)
    tried = [default]
    if options.tune:
        site, processors = site_of(kind, bucket, n, k, DTYPE, group, options.bits), processors_of(DEVICE)
        tried += candidates(site, group, processors)
    times: dict[GemmConfig, float] = {}
    for config in dict.fromkeys(tried):
        try:
            times[config] = microseconds(x, config, matrices, gated=gated, repeats=options.repeats)
        except KernelLaunchError as error:
            print(f"{config}: {error}", flush=True)
    best = min(times, key=lambda config: times[config])
    floor = one.num_bytes / bandwidth * 1e6
    dense = library(x, n, k, gated=gated, repeats=options.repeats)
    row = {
        "name": name,
        "batch": batch,
        "bytes": one.num_bytes,
        "default": times.get(default),
        "best": times[best],
    }
    row |= {"config": [*best], "default_config": [*default], "bfloat16": dense, "floor": floor}
    print(
        f"{name:8} [{n}, {k}] batch {batch:3}: {times.get(default, 0):7.2f} us by default {[*default]}, best "
        f"{times[best]:7.2f} us {[*best]}, {one.num_bytes / times[best] / 1e3:6.0f} GB/s, "
        f"{floor / times[best]:.0%} of a copy's; bfloat16 by the library {dense:7.2f} us",
        flush=True,
    )
    if options.tune:
        order = sorted(times, key=lambda config: times[config])
        print("   ", "; ".join(f"{[*config]} {times[config]:.2f}" for config in order[:6]), flush=True)
    return row


def check(batch: int, group: int, *, zero: bool, bits: int) -> None:
    """The default configuration agrees with the weights written out, before anything is timed."""
    one = make(1024, 2048, group, zero=zero, bits=bits)
    x = torch.randn(batch, 2048, device=DEVICE, dtype=DTYPE)
    bucket = bucket_of(batch)
    assert bucket is not None
    config = default_config("gated", bucket, 1024, 2048, group, processors_of(DEVICE), bits)
    out = _cuda.launch(x, one.weight, one.scale, one.zero, None, group, config, gated=True)
    dense = _cuda.write_out(one.weight, one.scale, one.zero, group)
    right = silu_and_mul(F.linear(x.float(), dense.float()).to(DTYPE))
    torch.testing.assert_close(out, right, rtol=0.03, atol=0.03)


def of_step(rows: list[dict[str, Any]], shape: str) -> dict[str, float]:
    """All projections of a step, without a head: sums of what was measured of each."""
    layers, kinds = SHAPES[shape]["num_hidden_layers"], ("default", "best", "bfloat16", "floor")
    return {kind: layers * sum(row[kind] for row in rows) / 1e3 for kind in kinds}


def chain(layers: list[list[Matrix]], x: Tensor, norm: Tensor) -> Tensor:
    """All projections, norms and gates of a step as the passes leave them; no attention, and no head."""
    residual, heads = x, slice(0, x.shape[1])
    for qkv, o, gate_up, down in layers:
        normed, residual = OPS.add_rms_norm.default(x, residual, norm, 1e-5)
        x = multiply(multiply(normed, qkv)[:, heads], o)
        normed, residual = OPS.add_rms_norm.default(x, residual, norm, 1e-5)
        x = multiply(multiply(normed, gate_up, gated=True), down)
    return x


def multiply(x: Tensor, m: Matrix, *, gated: bool = False) -> Tensor:
    """By the op, which chooses the configuration."""
    result: Tensor = OPS.linear_w4a16.default(x, m.weight, m.scale, m.zero, None, m.group, True, gated)
    return result


def milliseconds_of_chain(layers: list[list[Matrix]], batch: int, repeats: int) -> float:
    """Median time of all of it in one CUDA graph."""
    hidden = columns_of(layers[0][0].weight)
    x, norm = (torch.randn(size, device=DEVICE, dtype=DTYPE) for size in ((batch, hidden), (hidden,)))
    return seconds([lambda: chain(layers, x, norm)], repeats) * 1e3


def adopt_best(rows: list[dict[str, Any]], shape: str, batch: int, group: int, bits: int) -> None:
    """Let the op follow what was measured to be the fastest."""
    bucket, entries = bucket_of(batch), []
    assert bucket is not None
    for row in rows:
        kind: Kind = "gated" if row["name"] == "gate_up" else "linear"
        site = site_of(kind, bucket, *projections(shape)[row["name"]], DTYPE, group, bits)
        config, taken = GemmConfig(*row["config"]), row["best"]
        entries.append(Entry(site=site, kernel=config, microseconds=taken, otherwise=2 * taken))
    adopt(device_name_of(DEVICE, DTYPE), entries)


def main() -> None:
    """Print a line a projection as it is known, then write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["8b"], choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8), help="of a weight")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--zero", action="store_true", help="with zero points")
    parser.add_argument("--tune", action="store_true", help="try every configuration")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    bandwidth, gpu = copy_bandwidth(), torch.cuda.get_device_name()
    print(
        f"{gpu}, copy {bandwidth / 1e12:.2f} TB/s, {options.bits} bits, groups of {options.group}", flush=True
    )
    results: dict[str, Any] = {}
    for shape in options.shapes:
        sizes = list(projections(shape).values())
        layers = [
            [make(n, k, options.group, zero=options.zero, bits=options.bits) for n, k in sizes]
            for _ in range(SHAPES[shape]["num_hidden_layers"])
        ]
        for batch in options.batches:
            check(batch, options.group, zero=options.zero, bits=options.bits)
            rows = [
                of_projection(name, n, k, batch, options, bandwidth)
                for name, (n, k) in projections(shape).items()
            ]
            step = of_step(rows, shape) | {"graph": milliseconds_of_chain(layers, batch, options.repeats)}
            if options.tune:
                adopt_best(rows, shape, batch, options.group, options.bits)
                step["graph, tuned"] = milliseconds_of_chain(layers, batch, options.repeats)
            results[f"{shape} {batch}"] = {"projections": rows, "step_ms": step}
            print(shape, "batch", batch, "ms a step:", {k: round(v, 3) for k, v in step.items()}, flush=True)
    machine = {"gpu": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    document = {"machine": machine, "copy_bytes_per_s": bandwidth, "results": results}
    document |= {"bits": options.bits, "group": options.group}
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
