"""GEMM autotune on this GPU: measured for every shape that is shipped, and written.

First every configuration alone, as at a start that measures; then the best one between norms, as in
a step: where it loses there, its line has null. Nothing else may use the GPU meanwhile.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina.custom_ops.add_rms_norm_linear import _cuda as gated
from lamina.custom_ops.linear import _cuda as plain
from lamina.custom_ops.linear import autotune
from lamina.custom_ops.linear.choices import MEASURED, Entry, GemmConfig, Site, device_name_of, shipped

DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MEASURED, help="default: the package's own file")
    parser.add_argument("--shape", nargs=2, type=int, action="append", default=[], metavar=("N", "K"))
    options = parser.parse_args()
    plain.check_capability("linear")
    sites = dict.fromkeys(site for _, site in shipped())
    for n, k in options.shape:
        sites |= dict.fromkeys(replace(site, n=n, k=k) for site in list(sites))
    entries = [_in_steps(entry) for entry in autotune.autotune(sites, DEVICE, DTYPE)]
    measured = json.loads(MEASURED.read_text()) | {
        device_name_of(DEVICE, DTYPE): [entry.to_json() for entry in entries]
    }
    options.out.write_text(_as_text(measured))
    print(f"{len(entries)} sites of {device_name_of(DEVICE, DTYPE)} written to {options.out}")


def _in_steps(entry: Entry) -> Entry:
    """The entry, without its kernel where that loses between norms though it wins alone."""
    site = entry.site
    if entry.kernel is None or entry.microseconds >= entry.otherwise:
        return entry
    ours, library = _times_in_steps(site, entry.kernel)
    alone = f"{entry.microseconds:.2f} us, otherwise {entry.otherwise:.2f}"
    print(f"{site}: {alone}; between norms {ours:.2f}, otherwise {library:.2f}", flush=True)
    return entry if ours < library else replace(entry, kernel=None)


def _times_in_steps(site: Site, config: Any) -> tuple[float, float]:
    assert isinstance(config, GemmConfig)
    x, residual = (torch.randn(site.num_tokens, site.k, device=DEVICE, dtype=DTYPE) for _ in range(2))
    norm_weight = torch.ones(site.k, device=DEVICE, dtype=DTYPE)
    count = -(-autotune.ROTATED_BYTES // (site.n * site.k * DTYPE.itemsize))
    shape = count, site.n, site.k
    weights = [*(torch.randn(shape, device=DEVICE, dtype=DTYPE) / site.k**0.5)]
    launch = plain.launch if site.kind == "linear" else gated.launch
    otherwise = torch.nn.functional.linear if site.kind == "linear" else autotune._gemm_then_gate

    def behind_norm(gemm: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(weight: Tensor) -> Tensor:
            normed, _ = torch.ops.lamina.add_rms_norm.default(x, residual, norm_weight, 1e-5)
            return gemm(normed, weight)

        return call

    ours = behind_norm(lambda normed, weight: launch(normed, weight, None, config))
    return autotune._microseconds(ours, weights), autotune._microseconds(behind_norm(otherwise), weights)


def _as_text(measured: dict[str, list[Any]]) -> str:
    """As the package keeps it: a line a measurement."""
    blocks = []
    for gpu, lines in measured.items():
        rows = ",\n".join(f"  {json.dumps(line)}" for line in lines)
        blocks.append(f" {json.dumps(gpu)}: [\n{rows}\n ]")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    main()
