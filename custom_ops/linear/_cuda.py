"""The CUDA kernels of lamina::linear, for few rows; the library's GEMM wherever that was faster."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.errors import UnsupportedError
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import moves_in_vectors
from .._shared.registry import Provider
from .choices import (
    BUCKETS,
    GemmConfig,
    Kind,
    Method,
    Site,
    bucket_of,
    bucket_of_prompt,
    cached_until_adopted,
    choose,
    device_name_of,
    guess,
    name_of,
    one_order,
    processors_of,
)

HOPPER = (9, 0)
EVEN = 8  # elements: rows that TMA takes start, and end, at multiples of 16 bytes


class AdaptersBehind(NamedTuple):
    """Matrices A and B of adapters, by slots in multiples of 16 bytes, and the slot of each row."""

    a: Tensor
    b: Tensor
    slots: Tensor

    def words(self) -> tuple[int, ...]:
        """As the kernel takes them; csrc/include/split_k_shape.cuh has the same fields."""
        sizes = [one[0].numel() * one.element_size() for one in (self.a, self.b)]
        return (*(one.data_ptr() for one in self), *sizes)


NOTHING_BEHIND = 0, 0, 0, 0, 0


@functools.cache
def find_kernel() -> CudaKernel:
    """Build or load the kernel, once."""
    return CudaKernel("linear", "22q")  # struct LinearArguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    check_capability("linear")
    find_kernel()
    return linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    """The op, as op.py states it."""
    config = (config_of_one_order if batch_invariant else config_of)("linear", x, weight)
    return F.linear(x, weight, bias) if config is None else launch(x, weight, bias, config, batch_invariant)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: GemmConfig,
    splits_all: bool = False,
    *,
    promises_x: bool = False,
    behind: "AdaptersBehind | None" = None,
) -> Tensor:
    """x @ weight.T + bias by the kernel of this configuration; the tensors must fit.

    splits_all: whether the persistent kernel, too, divides the columns of every tile, not of the last alone.
    promises_x: whether a CUDA graph's kernel behind begins only when x is complete; csrc/include/pdl.cuh.
    behind: what that will read, for which the split-K kernel asks meanwhile, of up to 32 rows.
    """
    out = x.new_empty((x.shape[0], weight.shape[0]))
    find_kernel()(
        x.device,
        *(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()),
        *(x.shape[0], *weight.shape, x.stride(0)),
        *(*config, splits_all, promises_x, *(NOTHING_BEHIND if behind is None else behind.words())),
        DTYPES[x.dtype],
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
    if bucket is None and kind == "gated":
        bucket = bucket_of_prompt(x.shape[0])
    if bucket is None or not fits(x) or not fits(weight) or not weight.is_contiguous():
        return None
    n, k = weight.shape
    site = Site(kind=kind, num_tokens=bucket, n=n, k=k, dtype=name_of(x.dtype))
    config = choose(site, device_name_of(x.device, x.dtype)).kernel
    assert not isinstance(config, Method), "a method of CPUs"
    return config


def config_of_one_order(kind: Kind, x: Tensor, weight: Tensor) -> GemmConfig | None:
    """The configuration whose sums have the same bits for every number of rows; None where there are none.

    Raises UnsupportedError where no kernel of ours takes the tensors.
    """
    if 0 in (*x.shape, *weight.shape):
        return None
    if not fits(x) or not fits(weight) or not weight.is_contiguous():
        got = f"weight {list(weight.shape)} and x with strides {x.stride()}"
        raise UnsupportedError(
            f"batch_invariant is True, and no kernel takes {got}; wanted rows of 16 bytes' multiples"
        )
    n, k = weight.shape
    return _config_of_one_order(kind, x.shape[0], n, k, x.dtype, x.device)


@cached_until_adopted
def _config_of_one_order(
    kind: Kind, num_tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> GemmConfig:
    processors, bucket = processors_of(device), bucket_of(num_tokens)
    split_k = one_order(n, k, processors)
    site = Site(kind=kind, num_tokens=bucket or BUCKETS[-1], n=n, k=k, dtype=name_of(dtype), split_k=split_k)
    config = choose(site, device_name_of(device, dtype)).kernel if bucket else None
    config = config or guess(site, processors)
    if not isinstance(config, GemmConfig):
        raise UnsupportedError(f"batch_invariant is True, and no kernel serves {site}")
    return config


def fits(x: Tensor) -> bool:
    """Whether TMA takes the rows of x."""
    return x.stride(1) == 1 and x.numel() > 0 and moves_in_vectors(x, EVEN)


PROVIDER = Provider(
    name="cuda", load=load, devices=DEVICES, dtypes=frozenset({torch.bfloat16, torch.float16})
)
