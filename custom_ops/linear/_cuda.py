"""The CUDA kernels of lamina::linear, for few rows; the library's GEMM wherever that was faster."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.errors import UnsupportedError
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import moves_in_vectors
from .._shared.registry import Provider
from .choices import GemmConfig, Kind, Method, Site, bucket_of, choose, device_name_of, name_of

HOPPER = (9, 0)
EVEN = 8  # elements: rows that TMA takes start, and end, at multiples of 16 bytes


@functools.cache
def find_kernel() -> CudaKernel:
    """Build or load the kernel, once."""
    return CudaKernel("linear", "15q")  # struct LinearArguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    check_capability("linear")
    find_kernel()
    return linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    """The op, as op.py states it."""
    if batch_invariant:
        raise UnsupportedError("linear on cuda: batch_invariant is True, which is for CPUs so far")
    config = config_of("linear", x, weight)
    return F.linear(x, weight, bias) if config is None else launch(x, weight, bias, config)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, config: GemmConfig) -> Tensor:
    """x @ weight.T + bias by the kernel of this configuration; the tensors must fit."""
    out = x.new_empty((x.shape[0], weight.shape[0]))
    find_kernel()(
        x.device,
        *(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()),
        *(x.shape[0], *weight.shape, x.stride(0)),
        *(*config, DTYPES[x.dtype]),
    )
    return out


def check_capability(op: str) -> None:
    """Raise UnsupportedError where the current device's compute capability is not the kernels' own."""
    found = torch.cuda.get_device_capability()
    if found != HOPPER:
        raise UnsupportedError(f"the CUDA kernel of {op} is for compute capability {HOPPER}, not {found}")


def config_of(kind: Kind, x: Tensor, weight: Tensor) -> GemmConfig | None:
    """The configuration that serves these tensors; None where the library does."""
    bucket = bucket_of(x.shape[0])
    if bucket is None or not fits(x) or not fits(weight) or not weight.is_contiguous():
        return None
    n, k = weight.shape
    site = Site(kind=kind, num_tokens=bucket, n=n, k=k, dtype=name_of(x.dtype))
    config = choose(site, device_name_of(x.device, x.dtype)).kernel
    assert not isinstance(config, Method), "a method of CPUs"
    return config


def fits(x: Tensor) -> bool:
    """Whether TMA takes the rows of x."""
    return x.stride(1) == 1 and x.numel() > 0 and moves_in_vectors(x, EVEN)


PROVIDER = Provider(
    name="cuda", load=load, devices=DEVICES, dtypes=frozenset({torch.bfloat16, torch.float16})
)
