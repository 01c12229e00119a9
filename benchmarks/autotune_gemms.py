"""GEMM autotune on this GPU: measured for every shape that is shipped, and written.

First every configuration alone, as at a start that measures; then the best one between norms, as in
a step: where it loses there, its line has null. Nothing else may use the GPU meanwhile.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from workloads import SHAPES

from lamina.custom_ops.linear import _cuda as plain
from lamina.custom_ops.linear import autotune
from lamina.custom_ops.linear.choices import (
    BUCKETS,
    BYTES,
    MANY,
    MEASURED,
    Entry,
    GemmConfig,
    Site,
    allowance,
    device_name_of,
    parse_entry,
    shipped,
    sites_of,
)

FOUR_BITS = [f"w4a16/{size}" for size in (32, 64, 128, "all")] + ["w8a16/32"]
DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MEASURED, help="default: the package's own file")
    parser.add_argument(
        "--weights", default="dense", choices=["dense", *BYTES, *FOUR_BITS], help="how they are kept"
    )
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    rows = [*BUCKETS, *MANY]
    parser.add_argument("--rows", nargs="+", type=int, default=rows, choices=rows)
    parser.add_argument("--shape", nargs=2, type=int, action="append", default=[], metavar=("N", "K"))
    parser.add_argument(
        "--only", action="store_true", help="the shapes of --shape alone, without a gate behind"
    )
    options = parser.parse_args()
    plain.check_capability("linear")
    sites = [site for site in _sites(options) if site.num_tokens in options.rows]
    entries = [_in_steps(entry) for entry in autotune.autotune(sites, DEVICE, DTYPE)]
    name, measured = device_name_of(DEVICE, DTYPE), json.loads(MEASURED.read_text())
    others = [line for line in measured.get(name, []) if parse_entry(line).site not in sites]
    options.out.write_text(_as_text(measured | {name: [*others, *(entry.to_json() for entry in entries)]}))
    print(f"{len(entries)} sites of {name} written to {options.out}")


def _sites(options: argparse.Namespace) -> list[Site]:
    """What is measured: of weights in the dtype every site that is shipped, of others the shapes' own."""
    if options.weights != "dense":
        shapes = [shape for model in options.models for shape in projections(model)]
        gates = [projections(model)[2] for model in options.models] if options.weights in FOUR_BITS else []
        every = [
            sites_of("gated" if shape in gates else "linear", *shape, "bfloat16", options.weights)
            for shape in (*shapes, *options.shape)
        ]
        return list(dict.fromkeys(site for sites in every for site in sites))
    if options.only:
        return [site for shape in options.shape for site in sites_of("linear", *shape)]
    sites = dict.fromkeys(site for _, site in shipped() if site.weights == "dense")
    for n, k in options.shape:
        sites |= dict.fromkeys(replace(site, n=n, k=k) for site in list(sites))
    return list(sites)


def projections(model: str) -> list[tuple[int, int]]:
    """Rows and columns of each projection of a shape; the LM head is none."""
    sizes = SHAPES[model]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    heads = sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"]
    return [(heads * sizes["head_dim"], hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]


def _in_steps(entry: Entry) -> Entry:
    """The entry, without its kernel where that loses between norms though it wins alone."""
    site = entry.site
    if entry.kernel is None or entry.microseconds >= entry.otherwise * allowance(entry):
        return entry
    assert isinstance(entry.kernel, GemmConfig)
    ours, library = _times_in_steps(site, entry.kernel)
    alone = f"{entry.microseconds:.2f} us, otherwise {entry.otherwise:.2f}"
    print(f"{site}: {alone}; between norms {ours:.2f}, otherwise {library:.2f}", flush=True)
    return entry if ours < library else replace(entry, kernel=None)


def _times_in_steps(site: Site, config: GemmConfig) -> tuple[float, float]:
    """Microseconds of a norm and the GEMM behind it, by the kernel and by the library."""
    ways = autotune.ways_of(site, DEVICE, DTYPE)
    x, residual = (torch.randn(site.num_tokens, site.k, device=DEVICE, dtype=DTYPE) for _ in range(2))
    norm_weight = torch.ones(site.k, device=DEVICE, dtype=DTYPE)

    def behind_norm(gemm: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def call(weight: Any) -> Tensor:
            torch.ops.lamina.add_rms_norm.default(x, residual, norm_weight, 1e-5)
            return gemm(weight)

        return call

    ours = behind_norm(functools.partial(ways.ours, config))
    return tuple(autotune._microseconds(way, ways.weights) for way in (ours, behind_norm(ways.library)))


def _as_text(measured: dict[str, list[Any]]) -> str:
    """As the package keeps it: a line a measurement."""
    blocks = []
    for gpu, lines in measured.items():
        rows = ",\n".join(f"  {json.dumps(line)}" for line in lines)
        blocks.append(f" {json.dumps(gpu)}: [\n{rows}\n ]")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    main()
