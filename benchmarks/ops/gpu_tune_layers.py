"""Which kernels serve decode of few rows, in bfloat16, FP8 or four bits: candidates site by site.

Layers of random weights, with attention, norms and whatever quantizes between them, are captured in a graph
for each candidate of a GEMM, beside what has won of the others so far; a start takes seconds, as nothing is
compiled. Results are poisoned before each run that is compared with what the kernels gave that served first.
What wins is written as benchmarks/tune_steps.py writes it. At the end the layers are timed as shipped, as
found, and as found without each of the kernels that do more than a GEMM.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_layers import attention_of
from gpu_linear import DEVICE, DTYPE, EPS, OPS
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tune_steps import CLEARLY, Measurements, as_entry
from workloads import SHAPES

from lamina.common.errors import KernelLaunchError
from lamina.custom_ops._shared.build_cuda import load_cuda_kernel
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops.linear import autotune, choices
from lamina.custom_ops.linear.choices import Entry, GemmConfig, Kind, Site
from lamina.custom_ops.linear_w4a16 import configs as four_bits
from lamina.custom_ops.linear_w4a16.configs import site_of
from lamina.custom_ops.paged_attention import _plan
from lamina.runtime.worker.attention import PagedAttention

RESULT = Path(__file__).resolve().parent.parent / "results" / "gpu_tune_layers.json"
GROUP, CONTEXT, MAX_MODEL_LEN = 128, 192, 16384
MOST_DIFFERENCE = 0.1  # of results behind some layers of roundings, by their norm
KERNELS = (
    *(
        ("paged_attention", "cuda"),
        ("paged_attention", "rotary"),
        ("linear_w4a16", "cuda"),
        ("linear", "cuda"),
    ),
    *((op, "cuda") for op in ("scaled_linear", "linear_w8a8", "mlp_w8a8", "quantize_rows", "silu_and_mul")),
    *((op, "cuda") for op in ("add_rms_norm", "add_rms_norm_quantized", "act_and_mul_quantized")),
    ("linear_silu_and_mul", "cuda"),
)
Kernel = GemmConfig | None
Weight = tuple[Tensor, ...]  # in fewer bits, and scales; or alone
SITES: dict[str, tuple[tuple[str, Kind], ...]] = {  # in the order in which they are settled
    "fp8": (
        *(("qkv", "linear"), ("o", "linear"), ("o", "quantizing"), ("gate_up", "linear"), ("down", "linear")),
        *(("down", "quantizing"), ("gate_up", "gated")),
    ),
    "w4a16": (("qkv", "linear"), ("o", "linear"), ("gate_up", "gated"), ("down", "linear")),
    "bf16": (("qkv", "linear"), ("o", "linear"), ("gate_up", "gated"), ("down", "linear")),
}
PACES = (0, 1, 2, 3, 4, 6)


def main() -> None:
    """Print a line a site and what the layers take; write measurements after every site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--schemes", nargs="+", default=["fp8", "w4a16"], choices=list(SITES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--paces", action="store_true", help="of what serves, and nothing else")
    parser.add_argument("--layers", type=int, default=8, help="more than the L2 cache holds")
    parser.add_argument("--seconds", type=float, default=90, help="after which no other site is begun")
    parser.add_argument("--finalists", type=int, default=4, help="of a site, that are timed again")
    parser.add_argument("--measured", type=Path, default=RESULT.with_name("gpu_tune_layers_measured.json"))
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    build_kernels()
    ends, found = time.perf_counter() + options.seconds, {}
    results = Measurements(options.measured)
    for rows in options.rows:
        for scheme in options.schemes:
            layers = Layers(options.shape, scheme, rows, options.layers)
            found[f"{scheme} {rows}"] = tune(layers, results, ends, options)
            options.output.write_text(json.dumps(found, indent=1) + "\n")
            del layers
            torch.cuda.empty_cache()


def build_kernels() -> None:
    """Build what is not built yet, all at once."""
    started = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: load_cuda_kernel(*kernel), KERNELS))
    print(f"kernels in {time.perf_counter() - started:.1f} s", flush=True)


def tune(
    layers: "Layers", results: Measurements, ends: float, options: argparse.Namespace
) -> dict[str, float]:
    """Settle every site; microseconds a layer as shipped, as found, and without each kind of kernel."""
    title, shipped = f"{layers.scheme} {layers.rows} rows", layers.microseconds(9)
    print(f"{title}: {shipped:.2f} us a layer as shipped", flush=True)
    settled: dict[Site, Kernel] = {}
    sites = tuple(layers.sites())
    for site in sites:
        if (
            site.kind == "quantizing"
        ):  # what down reads it quantizes only behind a gate that is part of a GEMM
            gates = (gate for gate in sites if gate.kind == "gated")
            adopt({gate: autotune.candidates_of(gate, choices.processors_of(DEVICE))[0] for gate in gates})
        if time.perf_counter() > ends:
            print(f"{title}: no time is left for {site}", flush=True)
            break
        settled[site] = settle(layers, site, results, options)
    taken = {"shipped": shipped, "found": layers.microseconds(9)}
    for name, change in without(settled).items():
        adopt(change)
        layers.capture()
        taken[name] = layers.microseconds(9)
        adopt({site: settled[site] for site in change})
    taken |= by_splits(layers)
    print(title, {name: round(microseconds, 2) for name, microseconds in taken.items()}, flush=True)
    return taken


def by_splits(layers: "Layers") -> dict[str, float]:
    """Microseconds a layer where decode attention has no splits of fewer keys."""
    taken, shipped = {}, _plan.MIN_SPLIT_KEYS
    for keys in (64, 256, 512):
        _plan.MIN_SPLIT_KEYS = (keys, keys, *shipped[2:])
        layers.attend_anew()
        taken[f"splits of {keys} keys"] = layers.microseconds(9)
    _plan.MIN_SPLIT_KEYS = shipped
    layers.attend_anew()
    return taken


def settle(layers: "Layers", site: Site, results: Measurements, options: argparse.Namespace) -> Kernel:
    """What serves a site best, adopted from now on and written."""
    started = time.perf_counter()
    served = choices.choose(site, layers.device_name).kernel
    assert served is None or isinstance(served, GemmConfig)
    tried = autotune.candidates_of(site, choices.processors_of(DEVICE))
    if options.paces:
        tried = by_paces(site, served)
    elif layers.is_behind_attention(site) and paced_by(site):
        tried += tuple(one._replace(clusters=one.clusters | paced_by(site)) for one in tried)
    quick = race(layers, site, (served, None, *tried), repeats=1)
    best = sorted(quick, key=lambda kernel: quick[kernel])[: options.finalists]
    final = race(layers, site, (served, None, *best), repeats=7)
    winner = min(final, key=lambda kernel: final[kernel])
    if served in final and final[winner] > final[served] * CLEARLY:
        winner = served
    adopt({site: winner})
    layers.capture()
    ways = autotune.ways_of(site, DEVICE, DTYPE)
    apart = autotune._microseconds(ways.library, ways.weights)
    results.add(as_entry(site, winner, apart, final.get(None, final[winner]) - final[winner]))
    order = sorted(final, key=lambda kernel: final[kernel])
    times = "; ".join(f"{said(kernel)} {final[kernel]:.2f}" for kernel in order)
    seconds = time.perf_counter() - started
    print(f"  {site}: of {len(quick)} in {seconds:.1f} s, served {said(served)}: {times}", flush=True)
    return winner


def by_paces(site: Site, served: GemmConfig | None) -> tuple[GemmConfig, ...]:
    """What serves a site, by other paces of its first loads."""
    if served is None or served.is_persistent:
        return ()
    if flag := paced_by(site):
        return (served, served._replace(clusters=served.clusters ^ flag))
    return tuple(served._replace(clusters=pace) for pace in PACES)


def paced_by(site: Site) -> int:
    """What a configuration's clusters have more where its kernel loads the first weights at a pace."""
    if site.weights.startswith("w"):
        return four_bits.PACED
    return choices.PACED if site.kind == "quantizing" else 0


def race(layers: "Layers", site: Site, kernels: Iterable[Kernel], repeats: int) -> dict[Kernel, float]:
    """Microseconds a layer by each kernel that can be launched."""
    taken: dict[Kernel, float] = {}
    for kernel in dict.fromkeys(kernels):
        adopt({site: kernel})
        try:
            layers.capture()
        except KernelLaunchError as error:
            print(f"  {site}: {said(kernel)} does not run: {error}", flush=True)
            continue
        difference = layers.difference()
        if not difference < MOST_DIFFERENCE:
            print(f"  {site}: {said(kernel)} gives something else: {difference:.3f} off", flush=True)
            continue
        taken[kernel] = layers.microseconds(repeats)
    return taken


def without(settled: dict[Site, Kernel]) -> dict[str, dict[Site, Kernel]]:
    """What is otherwise where a kind of kernel is left out, by its name."""
    found: dict[str, dict[Site, Kernel]] = {}
    for kind in ("quantizing", "gated"):
        sites = {site: None for site, kernel in settled.items() if site.kind == kind and site.is_in_bytes}
        found |= {f"without {kind}": sites} if any(settled[site] for site in sites) else {}
    paced = {s: k for s, k in settled.items() if k and paced_by(s) and k.clusters & paced_by(s)}
    found |= {"without pace": {s: k._replace(clusters=k.clusters ^ paced_by(s)) for s, k in paced.items()}}
    return {name: change for name, change in found.items() if change}


def adopt(kernels: dict[Site, Kernel]) -> None:
    """Let these kernels serve their sites."""
    entries = [Entry(site=s, kernel=kernel, microseconds=0.0, otherwise=1.0) for s, kernel in kernels.items()]
    choices.adopt(choices.device_name_of(DEVICE, DTYPE), entries)


def said(kernel: Kernel) -> str:
    """A configuration in short."""
    return "apart" if kernel is None else "/".join(map(str, kernel))


@dataclass(frozen=True)
class Layer:
    """The projections of a layer."""

    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight


class Layers:
    """Some layers of a decode step of requests of one length, captured as often as kernels change."""

    def __init__(self, shape: str, scheme: str, rows: int, num_layers: int) -> None:
        self.scheme, self.rows, self._shape = scheme, rows, SimpleNamespace(**SHAPES[shape])
        self.device_name = choices.device_name_of(DEVICE, DTYPE)
        make = {"fp8": _fp8, "w4a16": _four_bits, "bf16": _plain}[scheme]
        self.layers = [Layer(*(make(n, k) for n, k in self._sizes().values())) for _ in range(num_layers)]
        self.x = torch.randn(rows, self._shape.hidden_size, device=DEVICE, dtype=DTYPE)
        self.norm = torch.ones(self._shape.hidden_size, device=DEVICE, dtype=DTYPE)
        angles = torch.rand(rows, self._shape.head_dim // 2, device=DEVICE)
        self.angles = angles.cos(), angles.sin()
        self.attention = self._attention()
        self._stream: Any = torch.cuda.Stream()
        self.capture()
        self._first = self._replayed()

    def _sizes(self) -> dict[str, tuple[int, int]]:
        s = self._shape
        heads = s.num_attention_heads + 2 * s.num_key_value_heads
        attended = s.num_attention_heads * s.head_dim
        return {
            "qkv": (heads * s.head_dim, s.hidden_size),
            "o": (s.hidden_size, attended),
            "gate_up": (2 * s.intermediate_size, s.hidden_size),
            "down": (s.hidden_size, s.intermediate_size),
        }

    def _attention(self) -> PagedAttention:
        return attention_of(vars(self._shape), len(self.layers), self.rows, CONTEXT, MAX_MODEL_LEN)

    def is_behind_attention(self, site: Site) -> bool:
        """Whether the site is the projection of what attention makes."""
        return (site.n, site.k) == self._sizes()["o"]

    def sites(self) -> Iterator[Site]:
        """The sites of the layers' GEMMs for as many rows."""
        bucket, sizes = choices.bucket_of(self.rows), self._sizes()
        assert bucket is not None
        for name, kind in SITES[self.scheme]:
            n, k = sizes[name]
            if self.scheme == "w4a16":
                yield site_of(kind, bucket, n, k, DTYPE, GROUP)
            elif self.scheme == "bf16":
                yield Site(kind=kind, num_tokens=bucket, n=n, k=k)
            elif kind != "quantizing" or bucket <= choices.QUANTIZING_ROWS:
                yield Site(kind=kind, num_tokens=bucket, n=n, k=k, weights="fp8")

    def attend_anew(self) -> None:
        """Capture the layers with attention as it is planned now."""
        _plan.plan.cache_clear()
        self.attention = self._attention()
        self.capture()

    def capture(self) -> None:
        """Capture the layers by the kernels that are chosen now."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            self.run()
        self._stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.out = self.run()
            finally:
                self.graph.capture_end()

    def _replayed(self) -> Tensor:
        with torch.cuda.stream(self._stream):
            self.out.fill_(torch.nan)
            self.graph.replay()
            result = self.out.double()
        self._stream.synchronize()
        return result

    def difference(self) -> float:
        """How far results are from those of the kernels that served first, by norms; NaN where some are."""
        return float((self._replayed() - self._first).norm() / self._first.norm())

    def run(self) -> Tensor:
        x, residual = self.x, self.x
        layer_of: Callable[..., tuple[Tensor, Tensor]] = getattr(self, f"_{self.scheme}")
        for number, layer in enumerate(self.layers):
            x, residual = layer_of(number, layer, x, residual)
        return x

    def _attend(self, number: int, qkv: Tensor) -> Tensor:
        s = self._shape
        heads = s.num_attention_heads, s.num_key_value_heads, s.num_key_value_heads
        split = qkv.view(self.rows, -1, s.head_dim).split(heads, 1)
        out = torch.empty_like(split[0], memory_format=torch.contiguous_format)
        self.attention(number, *split, out, *self.angles)
        return out.view(self.rows, -1)

    def _fp8(self, number: int, layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        norm = OPS.add_rms_norm_quantized.default
        values, scale, residual = norm(x, residual, self.norm, EPS, 0, FP8, False, False)
        qkv = OPS.scaled_linear.default(values, scale, *layer.qkv, None, DTYPE)
        x = OPS.linear_w8a8.default(self._attend(number, qkv), *layer.o)
        values, scale, residual = norm(x, residual, self.norm, EPS, 0, FP8, False, False)
        mlp = values, scale, *layer.gate_up, None, *layer.down, None
        return OPS.mlp_w8a8.default(*mlp, DTYPE), residual

    def _w4a16(self, number: int, layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        norm, multiply = OPS.add_rms_norm.default, OPS.linear_w4a16.default
        rest = None, None, GROUP, True
        normed, residual = norm(x, residual, self.norm, EPS)
        qkv = multiply(normed, *layer.qkv, *rest, False)
        x = multiply(self._attend(number, qkv), *layer.o, *rest, False)
        normed, residual = norm(x, residual, self.norm, EPS)
        gated = multiply(normed, *layer.gate_up, *rest, True)
        return multiply(gated, *layer.down, *rest, False), residual

    def _bf16(self, number: int, layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        whole, linear = OPS.add_rms_norm_linear.default, OPS.linear.default
        qkv, residual = whole(x, residual, self.norm, EPS, layer.qkv[0], None, False)
        x = linear(self._attend(number, qkv), layer.o[0])
        gated, residual = whole(x, residual, self.norm, EPS, layer.gate_up[0], None, True)
        return linear(gated, layer.down[0]), residual

    def microseconds(self, repeats: int, replays: int = 8) -> float:
        """What a layer takes, the median of some repeats behind one that does not count."""
        taken = []
        with torch.cuda.stream(self._stream):
            for _ in range(repeats + 1):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(replays):
                    self.graph.replay()
                end.record()
                end.synchronize()
                taken.append(start.elapsed_time(end) * 1e3 / replays / len(self.layers))
        return statistics.median(taken[1:])


def _fp8(n: int, k: int) -> Weight:
    values = torch.randn(n, k, device=DEVICE, dtype=DTYPE).mul_(30).clamp_(-448, 448).to(FP8)
    return values, torch.rand(n, device=DEVICE) / (30 * k**0.5)


def _plain(n: int, k: int) -> Weight:
    return (torch.randn(n, k, device=DEVICE, dtype=DTYPE) / k**0.5,)


def _four_bits(n: int, k: int) -> Weight:
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)  # as good as any, shuffled
    return weight, (torch.rand(n, k // GROUP, device=DEVICE) / (4 * k**0.5)).to(DTYPE)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
