"""Which kernel serves each GEMM of a decode step, by what whole steps take: written as the package keeps it.

Configurations are measured alone first; those that are near the best of a site, and the library's kernel,
are then captured into steps of a loaded model, one site after another, each beside what served before.
An entry says what the library takes alone, and that less what a step gains a call by the kernel. The file is
written after every site, so that what a limit of time leaves out is all that is missing.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from autotune_gemms import _as_text
from gpu_steps import DecodeStep, load

from lamina.common.errors import KernelLaunchError
from lamina.custom_ops.linear import autotune, choices
from lamina.custom_ops.linear.choices import BUCKETS, MEASURED, Entry, GemmConfig, Site, parse_entry
from lamina.runtime.startup.builder import gemms_of
from lamina.runtime.startup.kernel_choice import sites_of

DEVICE, DTYPE, CONTEXT = torch.device("cuda", 0), torch.bfloat16, 192
Kernel = GemmConfig | None  # None: the library's
CLEARLY = 0.999  # of a step: less is noise
DENSE = "none"  # no quantization
LEAST = 0.01  # microseconds of a call


def main() -> None:
    """Print a line a site as it is known; write the measurements after each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["1b", "8b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 256], choices=list(BUCKETS))
    parser.add_argument(
        "--near", type=float, default=1.12, help="of the best time alone, what is tried in steps"
    )
    parser.add_argument(
        "--most", type=int, default=5, help="configurations of a site that are tried in steps"
    )
    parser.add_argument(
        "--quantization", nargs="+", default=[DENSE], help="as the setting of that name, one after another"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no other site is begun")
    parser.add_argument("--cache-dir")
    parser.add_argument(
        "--out", type=Path, default=MEASURED, help="what it has is kept; default: the package's own file"
    )
    options = parser.parse_args()
    ends = time.perf_counter() + options.seconds
    results = Measurements(options.out)
    for shape, quantization in itertools.product(options.shapes, options.quantization):
        scheme, sizes = None if quantization == DENSE else quantization, (max(options.rows), CONTEXT)
        if time.perf_counter() > ends:
            print(f"no time is left for {shape} {quantization}", flush=True)
            continue
        with load(shape, options.cache_dir, *sizes, quantization=scheme) as runtime:
            for rows in options.rows:
                for entry in tune(runtime, f"{shape} {quantization}", rows, ends, options):
                    results.add(entry)


class Measurements:
    """The entries of this GPU in a file, which is written anew with each that is added."""

    def __init__(self, path: Path) -> None:
        """Of a file that is not there yet: those that are shipped."""
        self._path, self._name = path, choices.device_name_of(DEVICE, DTYPE)
        self._measured = json.loads((path if path.exists() else MEASURED).read_text())
        entries = map(parse_entry, self._measured.get(self._name, []))
        self._entries = {entry.site: entry for entry in entries}
        choices.adopt(self._name, self._entries.values())

    def add(self, entry: Entry) -> None:
        """In place of what was known of its site."""
        self._entries[entry.site] = entry
        lines = [one.to_json() for one in self._entries.values()]
        self._path.write_text(_as_text(self._measured | {self._name: lines}))


def tune(runtime: Any, title: str, rows: int, ends: float, options: argparse.Namespace) -> Iterator[Entry]:
    """The entries of a model's sites for a number of rows; they serve from then on."""
    started = time.perf_counter()
    step = DecodeStep(runtime, rows, CONTEXT)
    before, sites = _ms(step), sites_to_tune(runtime, rows)
    for num_done, site in enumerate(sites):
        if time.perf_counter() > ends:
            print(f"{title} batch {rows}: no time is left for {len(sites) - num_done} sites", flush=True)
            return
        yield tune_site(step, site, options)
    after, seconds = _ms(step), time.perf_counter() - started
    print(f"{title} batch {rows}: {before:.4f} ms before, {after:.4f} after, in {seconds:.0f} s", flush=True)


def sites_to_tune(runtime: Any, rows: int) -> list[Site]:
    """Those that serve decode of so many rows."""
    loaded = runtime._loaded
    gemms = gemms_of([loaded.compiled.plan], loaded.resolved)
    sites = [site for site in sites_of(gemms, DEVICE, DTYPE) if site.num_tokens == rows]
    gates = {(site.n, site.k) for site in sites if site.kind == "gated" and not site.is_in_bytes}
    # A GEMM with a gate's shape serves in prefill alone, unless the gate's own kernel loses.
    return [site for site in sites if site.kind == "gated" or (site.n, site.k) not in gates]


def tune_site(step: DecodeStep, site: Site, options: argparse.Namespace) -> Entry:
    """What serves a site best in steps, adopted."""
    served = choices.choose(site, choices.device_name_of(DEVICE, DTYPE)).kernel
    alone, library = measure_alone(site)
    best = min(alone.values(), default=library)
    near = [config for config in alone if alone[config] <= best * options.near]
    near = sorted(near, key=lambda config: alone[config])[: options.most]
    kernels: list[Kernel] = list(dict.fromkeys([served, *near, None]))
    taken = race(step, site, kernels)
    final = race(step, site, [*sorted(kernels, key=lambda kernel: taken[kernel])[:2], served, None])
    winner = min(final, key=lambda kernel: final[kernel])
    if final[winner] > final[served] * CLEARLY:
        winner = served
    tried = "; ".join(f"{_said(kernel)} {taken[kernel]:.4f}" for kernel in kernels)
    print(f"{site}: {_said(winner)}, {final[winner]:.4f} ms for {final[served]:.4f} ({tried})", flush=True)
    entry = as_entry(site, winner, library, (final[None] - final[winner]) * 1e3 / calls_of(step, site))
    choices.adopt(choices.device_name_of(DEVICE, DTYPE), [entry])
    step.capture()
    return entry


def measure_alone(site: Site) -> tuple[dict[GemmConfig, float], float]:
    """Microseconds of every configuration by itself, and of the library."""
    ways = autotune.ways_of(site, DEVICE, DTYPE)
    library = autotune._microseconds(ways.library, ways.weights)
    taken = {}
    for config in autotune.candidates_of(site, choices.processors_of(DEVICE)):
        try:
            taken[config] = autotune._microseconds(partial(ways.ours, config), ways.weights)
        except KernelLaunchError as error:
            print(f"{site}: {config} does not run: {error}", flush=True)
    return taken, library


def race(step: DecodeStep, site: Site, kernels: Iterable[Kernel]) -> dict[Kernel, float]:
    """Milliseconds of a step by each kernel."""
    taken = {}
    for kernel in dict.fromkeys(kernels):
        entry = Entry(site=site, kernel=kernel, microseconds=0.0, otherwise=1.0)
        choices.adopt(choices.device_name_of(DEVICE, DTYPE), [entry])
        step.capture()
        taken[kernel] = _ms(step)
    return taken


def calls_of(step: DecodeStep, site: Site) -> int:
    """How often a step multiplies by weights of these shapes."""
    model = step.runtime._loaded.resolved.model
    return 1 if site.n == model.vocab_size else int(model.num_layers)


def as_entry(site: Site, kernel: Kernel, library: float, gained: float) -> Entry:
    """The entry that has the kernel chosen where it gains microseconds a call, however few."""
    taken = max(library - gained, LEAST)  # the library's kernel may cost a step more than it takes alone
    entry = Entry(site=site, kernel=kernel, microseconds=round(taken, 2), otherwise=round(library, 2))
    if kernel is None or entry.microseconds < entry.otherwise * choices.allowance(entry):
        return entry
    return replace(entry, kernel=None)


def _ms(step: DecodeStep) -> float:
    return statistics.median(step.milliseconds(replays=15, repeats=5))


def _said(kernel: Kernel) -> str:
    return "library" if kernel is None else "/".join(map(str, kernel))


if __name__ == "__main__":
    main()
