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
from ..linear.choices import GemmConfig
from ..scaled_linear._cuda import config_of, source_of
from . import _composed

FEW = 2  # rows; each block reads them whole, for their scales: of more, a kernel of its own is quicker
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
    """The configuration of the kernel for these tensors; None where it does not take them."""
    if x.shape[0] > FEW or x.stride(1) != 1 or not fits_vectors(MOST_TILES * TILE, x):
        return None
    config = config_of(x.shape[0], weight, scale, x.dtype, needs_ours=True)
    return config if config is not None and (config.multicast, config.clusters) == (1, 0) else None


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=NARROW)
