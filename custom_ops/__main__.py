"""python -m lamina.custom_ops [OP …]: compile the CUDA kernels ahead of use; no GPU is needed."""

import argparse
import itertools
import time

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
    options = parser.parse_args()
    for op, architecture in itertools.product(options.ops or known, options.arch):
        for path in sorted((CSRC / op).glob("*.cu")):
            start = time.monotonic()
            build_cuda(op, architecture, CSRC, Store(), path.stem)
            print(f"{op}/{path.name} {architecture}: {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
