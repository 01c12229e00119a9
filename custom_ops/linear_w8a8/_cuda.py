"""The CUDA kernel of lamina::linear_w8a8 for few rows, which quantizes them while weights stream in."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.fp8 import FP8
from .._shared.quantized import NARROW, fits_vectors
from .._shared.registry import Provider
from ..linear._cuda import check_capability
from ..linear.choices import (
    QUANTIZING_ROWS,
    GemmConfig,
    Method,
    Site,
    bucket_of_bytes,
    choose,
    device_name_of,
    kept_as,
    name_of,
)
from ..scaled_linear._cuda import config_of, source_of
from . import _composed

FEW = 2  # rows, where nothing was measured: each block reads them whole, which of more takes too long
MOST_TILES, TILE = 128, 128  # of columns, that a block holds; columns of one


@functools.cache
def find_kernel(dtype: torch.dtype) -> CudaKernel:
    """Build or load the kernel of weights in a format, once."""
    return CudaKernel("linear_w8a8", "17q", source_of(dtype))  # struct LinearW8A8Arguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel of FP8; the op's function, which finds that of int8 when it is needed."""
    check_capability("linear_w8a8")
    find_kernel(FP8)
    return linear_w8a8


def linear_w8a8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The op, as op.py states it."""
    config = few_rows_config(x, weight, scale)
    if config is None:
        return _composed.linear_w8a8(x, weight, scale, bias)
    return launch(x, weight, scale, bias, config)


def launch(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, config: GemmConfig) -> Tensor:
    """The op by the kernel of this configuration; the tensors must fit."""
    out = x.new_empty((x.shape[0], weight.shape[0]))
    groups = scale.shape[1] if scale.dim() == 2 else 0
    bias = None if bias is None else bias.contiguous()
    find_kernel(weight.dtype)(
        x.device,
        *(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), scale.data_ptr()),
        *(out.data_ptr(), x.shape[0], *weight.shape, x.stride(0), groups),
        *(*config, DTYPES[x.dtype]),
    )
    return out


def few_rows_config(x: Tensor, weight: Tensor, scale: Tensor) -> GemmConfig | None:
    """The configuration of the kernel for these tensors; None where quantizing is left to a kernel ahead."""
    num_tokens = x.shape[0]
    if num_tokens > QUANTIZING_ROWS or x.stride(1) != 1 or not fits_vectors(MOST_TILES * TILE, x):
        return None
    config = config_of(num_tokens, weight, scale, x.dtype, needs_ours=True)  # None where no kernel takes them
    (n, k), kept = weight.shape, kept_as(weight.dtype, scale.dim())
    bucket = bucket_of_bytes(num_tokens)
    site = Site(kind="quantizing", num_tokens=bucket, n=n, k=k, dtype=name_of(x.dtype), weights=kept)
    choice = choose(site, device_name_of(x.device, x.dtype))
    if config is None or choice.is_measured:
        assert not isinstance(choice.kernel, Method), "a method of CPUs"
        return config and choice.kernel
    is_plain = num_tokens <= FEW and config.multicast == 1 and not config.is_persistent
    return config._replace(clusters=0) if is_plain else None  # which are something else of that kernel's


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=NARROW)
