"""CUDA kernels: csrc/<op>/<source>.cu compiled once by nvcc alone for the GPU at hand, kept in the store."""

import ctypes
import functools
import shutil
from pathlib import Path

import torch

from ...common import env
from ...common.errors import KernelBuildError
from ...common.store import Store
from .build import (
    CSRC,
    find_or_build,
    first_error,
    hash_factors,
    keep,
    load_library,
    logger,
    read_sources,
    run_tool,
)
from .ledger import LEDGER

FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-Xcompiler=-fPIC", "-shared", "--split-compile=0")
TOOLKIT = Path("/usr/local/cuda")


def load_cuda_kernel(op: str, source: str = "cuda") -> ctypes.CDLL:
    """The shared library of csrc/<op>/<source>.cu for the current device, built on first use."""
    return _load(op, source, device_architecture())


@functools.cache
def _load(op: str, source: str, architecture: str) -> ctypes.CDLL:
    store = LEDGER.store
    return load_library(op, store, lambda: build_cuda(op, architecture, CSRC, store, source))


def device_architecture() -> str:
    """nvcc's name of the current device's architecture, with all its instructions where kernels use them."""
    major, minor = torch.cuda.get_device_capability()
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def build_cuda(op: str, architecture: str, csrc: Path, store: Store, source: str = "cuda") -> Path:
    """Where the built library lies; many processes at once compile it only once."""
    texts = read_sources(op, csrc, (".cu", ".cuh"))
    key = hash_factors(op, source, texts, FLAGS, architecture)  # as for a CPU, not the compiler
    return find_or_build(op, key, store, lambda key: _build(op, source, architecture, csrc, store, key))


def find_nvcc() -> str:
    """nvcc of CUDA_HOME, of PATH, or of /usr/local/cuda, the first there is."""
    chosen = env.cuda_home()
    if chosen and not shutil.which(f"{chosen}/bin/nvcc"):
        raise KernelBuildError(f"CUDA_HOME is {chosen!r}, which has no bin/nvcc; correct or unset it")
    nvcc = shutil.which(f"{chosen}/bin/nvcc" if chosen else "nvcc") or shutil.which(TOOLKIT / "bin" / "nvcc")
    if nvcc is None:
        raise KernelBuildError(f"no nvcc on PATH or in {TOOLKIT}; install the CUDA toolkit or set CUDA_HOME")
    return nvcc


def _build(op: str, source: str, architecture: str, csrc: Path, store: Store, key: str) -> Path:
    nvcc = find_nvcc()
    logger.info("compiling %s.cu of %s for %s, once on this machine", source, op, architecture)
    with store.temporary_folder(for_compiler=True) as folder:
        target = folder / f"{op}.so"
        path, include = csrc / op / f"{source}.cu", csrc / "include"
        generate = f"-gencode=arch={architecture.replace('sm', 'compute')},code={architecture}"
        command = [nvcc, *FLAGS, generate, f"-I{include}", str(path), "-o", str(target)]
        result = run_tool(command, folder)
        if result.returncode:
            output = result.stderr + result.stdout
            raise KernelBuildError(f"the CUDA kernel of {op} did not compile: {first_error(output)}")
        version = run_tool([nvcc, "--version"]).stdout.strip().rpartition("\n")[2]
        return keep(store, key, target, op=op, architecture=architecture, compiler=version)
