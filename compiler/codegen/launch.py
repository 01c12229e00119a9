"""Stored Triton kernels launched by the CUDA driver itself: no import of Triton or Inductor."""

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...common import env
from ...common.errors import KernelLaunchError
from ...common.store import Store

THREADS_PER_WARP = 32
STATIC_SHARED = 48 * 1024  # bytes of shared memory that a kernel has without asking for more
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
GRIDS = {"Grid1D": "x", "Grid2D": "xy", "Grid3D": "xyz"}  # Inductor's names, with the dimensions they cover
TAKEN_TYPES = "OilI"  # pointers and integers, by the letters that torch's own launcher has for them


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonKernel:
    """How a compiled kernel is launched; positions count the arguments that generated code passes."""

    cubin: str  # digest
    symbol: str
    num_warps: int
    shared: int  # bytes
    arguments: tuple[int, ...]  # positions of those that the kernel takes
    num_scratch: int  # null pointers that follow them
    grid: tuple[tuple[int, int], ...]  # per dimension: position of its size, and what a program covers
    num_registers: int | None = None  # of a thread, where Triton said

    def as_record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def read_kernel(record: Mapping[str, Any]) -> TritonKernel:
    """A kernel from its JSON; KeyError or TypeError where that is no record of one."""
    arguments = tuple(record["arguments"])
    grid = tuple((size, block) for size, block in record["grid"])
    return TritonKernel(**{**record, "arguments": arguments, "grid": grid})


def kernels_of(namespace: Mapping[str, Any], store: Store) -> dict[str, TritonKernel]:
    """The Triton kernels of a source that Inductor has run, put into the store, by name.

    Left out is what has several forms to choose from, or takes more than pointers and integers.
    """
    tuners = [value for value in namespace.values() if hasattr(value, "compile_results")]
    found = {tuner.fn.__name__: _kernel_of(tuner, store) for tuner in tuners}
    return {name: kernel for name, kernel in sorted(found.items()) if kernel is not None}


def _kernel_of(tuner: Any, store: Store) -> TritonKernel | None:
    """What Inductor's own launcher knows of a kernel, if it is plain enough."""
    compiled = [result.kernel for result in tuner.compile_results]
    if len(compiled) != 1 or len(tuner.launchers) != 1 or not hasattr(compiled[0], "arg_tys"):
        return None
    (kernel,), (launcher,), meta = compiled, tuner.launchers, tuner.inductor_meta
    declared, constant = set(kernel.declared_constexprs), set(kernel.full_constexprs)
    passed = [position for position in range(len(kernel.arg_names)) if position not in declared]
    names = [kernel.arg_names[position] for position in passed]
    dimensions = GRIDS.get(meta.get("grid_type", ""), "?")
    if "extra_launcher_args" in meta or not set(kernel.arg_tys) <= set(TAKEN_TYPES):
        return None
    if any(f"{letter}numel" not in names for letter in dimensions):
        return None
    cubin = env.triton_cache() / launcher.cache_hash / f"{kernel.name}.cubin"
    blocks = launcher.config.kwargs
    return TritonKernel(
        cubin=store.put(cubin.read_bytes()),
        symbol=kernel.name,
        num_registers=getattr(kernel, "n_regs", None),
        num_warps=kernel.num_warps,
        shared=kernel.shared,
        arguments=tuple(position for position, which in enumerate(passed) if which not in constant),
        num_scratch=kernel.has_global_scratch + kernel.has_profile_scratch,
        grid=tuple((names.index(f"{one}numel"), blocks.get(f"{one.upper()}BLOCK", 1)) for one in dimensions),
    )


class Launcher:
    """A loaded kernel under the interface that generated code expects of one."""

    def __init__(self, kernel: TritonKernel, store: Store, device: torch.device) -> None:
        self._kernel = kernel
        self._threads = kernel.num_warps * THREADS_PER_WARP
        count = len(kernel.arguments) + kernel.num_scratch
        self._values, self._addresses = ctypes.c_uint64 * count, ctypes.c_void_p * count
        self._function = _load(store.get(kernel.cubin), kernel.symbol, kernel.shared, device)

    def run(self, *arguments: Any, stream: int) -> None:
        """Launch on a stream; nothing waits, and nothing is allocated on the device."""
        kernel = self._kernel
        sizes = [-(-arguments[size] // block) for size, block in kernel.grid] + [1, 1]
        taken = [arguments[position] for position in kernel.arguments]
        values = self._values(*(one.data_ptr() if isinstance(one, Tensor) else one for one in taken))
        start = ctypes.addressof(values)
        addresses = self._addresses(*range(start, start + ctypes.sizeof(values), 8))
        block = self._threads, 1, 1
        check(
            driver().cuLaunchKernel(
                self._function, *sizes[:3], *block, kernel.shared, ctypes.c_void_p(stream), addresses, None
            ),
            f"launch of {kernel.symbol}",
        )


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelLaunchError(f"the CUDA driver cannot be loaded: {error}") from error


def check(status: int, what: str) -> None:
    """Raise for a failed call of the driver."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise KernelLaunchError(f"{what}: {(text.value or b'?').decode()} (CUDA error {status})")


def _load(cubin: bytes, symbol: str, shared: int, device: torch.device) -> ctypes.c_void_p:
    """The kernel of a cubin, on the context that torch uses of the device; it stays loaded."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # the first call there is has to make the context
        check(driver().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {symbol}")
        name = symbol.encode()
        check(driver().cuModuleGetFunction(ctypes.byref(function), module, name), f"finding {symbol}")
        if shared > STATIC_SHARED:
            status = driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared)
            check(status, f"{shared} bytes of shared memory for {symbol}")
    return function
