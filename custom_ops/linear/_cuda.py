"""The CUDA kernel of lamina::linear, for few rows; the library's product wherever that was faster."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.errors import UnsupportedError
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.layout import moves_in_vectors
from .._shared.registry import Provider
from .choices import Cut, Kind, Method, Site, bucket_of, card_of, choose, name_of

HOPPER = (9, 0)
EVEN = 8  # elements: rows that bulk copies take start, and end, at multiples of 16 bytes


@functools.cache
def find_kernel() -> CudaKernel:
    """The compiled kernel."""
    return CudaKernel("linear", "15q")  # struct LinearArguments


def load() -> Callable[..., Tensor]:
    """The kernel behind the op's signature."""
    check_card("linear")
    find_kernel()
    return linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The op's signature."""
    cut = cut_of("linear", x, weight)
    return F.linear(x, weight, bias) if cut is None else launch(x, weight, bias, cut)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    """The product of tensors that fit, cut as told."""
    out = x.new_empty((x.shape[0], weight.shape[0]))
    find_kernel()(
        x.device,
        *(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()),
        *(x.shape[0], *weight.shape, x.stride(0)),
        *(*cut, DTYPES[x.dtype]),
    )
    return out


def check_card(op: str) -> None:
    """Refuse the current device where the kernel has no instructions for it."""
    found = torch.cuda.get_device_capability()
    if found != HOPPER:
        raise UnsupportedError(f"the CUDA kernel of {op} is for compute capability {HOPPER}, not {found}")


def cut_of(kind: Kind, x: Tensor, weight: Tensor) -> Cut | None:
    """How the kernel cuts the product of these tensors; None where it is not the choice or cannot be."""
    bucket = bucket_of(x.shape[0])
    if bucket is None or not fits(x) or not fits(weight) or not weight.is_contiguous():
        return None
    n, k = weight.shape
    site = Site(kind=kind, num_tokens=bucket, n=n, k=k, dtype=name_of(x.dtype))
    cut = choose(site, card_of(x.device, x.dtype)).cut
    assert not isinstance(cut, Method), "a method of CPUs"
    return cut


def fits(x: Tensor) -> bool:
    """Whether bulk copies take the rows of x."""
    return x.stride(1) == 1 and x.numel() > 0 and moves_in_vectors(x, EVEN)


PROVIDER = Provider(
    name="cuda", load=load, devices=DEVICES, dtypes=frozenset({torch.bfloat16, torch.float16})
)
