"""The CUDA kernels of lamina::mlp_w8a8 for few rows: two launches in place of three where that won.

The first makes silu_and_mul where the sums of gate and up are, in 16 bits, half of what both are. The second
quantizes that while the weights of down stream in: lamina::linear_w8a8.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cuda_kernel import DEVICES, CudaKernel
from .._shared.fp8 import FP8
from .._shared.quantized import FORMATS, NARROW
from .._shared.registry import Provider
from ..linear._cuda import check_capability
from ..linear.choices import (
    GATED_ROWS,
    GemmConfig,
    Method,
    Site,
    bucket_of,
    choose,
    device_name_of,
    kept_as,
    name_of,
)
from ..scaled_linear._cuda import EVEN, call, source_of
from . import _composed

OPS = torch.ops.lamina


@functools.cache
def find_kernel(dtype: torch.dtype) -> CudaKernel:
    """Build or load the kernel of operands in a format, once."""
    return CudaKernel("mlp_w8a8", "19q", source_of(dtype))  # struct ScaledLinearArguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel of FP8; the op's function, which finds that of int8 when it is needed."""
    check_capability("mlp_w8a8")
    find_kernel(FP8)
    return mlp_w8a8


def mlp_w8a8(
    x: Tensor,
    x_scale: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The op, as op.py states it."""
    x = x.contiguous()
    config = config_of(x, gate_up, gate_up_scale, dtype)
    if config is None:
        first, second = (gate_up, gate_up_scale, gate_up_bias), (down, down_scale, down_bias)
        return _composed.mlp_w8a8(x, x_scale, *first, *second, dtype)
    gated = launch(x, x_scale, gate_up, gate_up_scale, gate_up_bias, dtype, config)
    out: Tensor = OPS.linear_w8a8.default(gated, down, down_scale, down_bias)
    return out


def launch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: GemmConfig,
) -> Tensor:
    """silu_and_mul of gate and up by the kernel of this configuration; the tensors must fit."""
    out = x.new_empty((x.shape[0], weight.shape[0] // 2), dtype=dtype)
    call(find_kernel(x.dtype), x, x_scale, weight, scale, bias, out, config)
    return out


def config_of(x: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> GemmConfig | None:
    """The configuration that serves gate and up of so many rows; None where the ops apart do."""
    fits = x.data_ptr() % EVEN == weight.data_ptr() % EVEN == weight.shape[1] % EVEN == 0
    bucket = bucket_of(x.shape[0])
    if bucket is None or bucket > GATED_ROWS or not fits or x.numel() == 0 or dtype not in NARROW:
        return None
    (n, k), kept = weight.shape, kept_as(weight.dtype, scale.dim())
    site = Site(kind="gated", num_tokens=bucket, n=n, k=k, dtype=name_of(dtype), weights=kept)
    config = choose(site, device_name_of(x.device, dtype)).kernel
    assert not isinstance(config, Method), "a method of CPUs"
    return config


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=FORMATS)
