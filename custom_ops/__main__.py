"""python -m lamina.custom_ops [OP …]: compile the CUDA kernels ahead of use; no GPU is needed."""

import argparse
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..common.store import Store
from ._shared.build import CSRC
from ._shared.build_cuda import build_cuda

ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")


def main() -> None:
    """Compile every CUDA kernel, or those named, for each architecture; no GPU is needed."""
    known = sorted(path.parent.name for path in CSRC.glob("*/cuda.cu"))
    parser = argparse.ArgumentParser(prog="python -m lamina.custom_ops", description=main.__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"one of {', '.join(known)}; default: all")
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, help="default: %(default)s")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compilers at once (%(default)s)"
    )
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"argument --jobs: {options.jobs}; wanted 1 or more")
    kernels = itertools.product(options.ops or known, options.arch)
    with ThreadPoolExecutor(options.jobs) as pool:
        for line in pool.map(_compile, (each for kernel in kernels for each in _sources_of(*kernel))):
            print(line, flush=True)


def _sources_of(op: str, architecture: str) -> list[tuple[str, str, Path]]:
    return [(op, architecture, path) for path in sorted((CSRC / op).glob("*.cu"))]


def _compile(source: tuple[str, str, Path]) -> str:
    op, architecture, path = source
    start = time.monotonic()
    build_cuda(op, architecture, CSRC, Store(), path.stem)
    return f"{op}/{path.name} {architecture}: {time.monotonic() - start:.1f} s"


if __name__ == "__main__":
    main()
