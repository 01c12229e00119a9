"""The CUDA kernels of lamina::linear_w4a16, for shuffled weights.

Up to 256 rows they are dequantized in registers on their way to the tensor cores. For more they are written
out in x's dtype, once a call, for the library's GEMM. Weights by rows, and other groups than it counts,
are the Triton provider's.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.errors import KernelBuildError
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from ..linear._cuda import check_capability, fits
from ..linear.choices import MAX_SHARED, GemmConfig, Kind
from . import reference
from .configs import PLAIN_GROUP, config_of, general, group_shift, most_stages
from .layout import TILE, bits_of, columns_of

NARROW = frozenset({torch.bfloat16, torch.float16})
NO_CONFIG = GemmConfig(0, 0, 0, 0, 0)
BULK = 16  # bytes: of whose multiples bulk copies begin


@functools.cache
def find_kernel(bits: int = 4) -> CudaKernel:
    """Build or load the kernel of weights of so many bits, once."""
    return CudaKernel("linear_w4a16", "20q", source_of(bits))  # struct LinearW4A16Arguments


def source_of(bits: int) -> str:
    """The file of a kernel's library, of which there is one a number of bits."""
    return "eight_bits" if bits == 8 else "cuda"


@functools.cache
def find_triton() -> Callable[..., Tensor]:
    """The Triton provider's function; the formula where Triton is not installed."""
    try:
        return triton_provider("linear_w4a16").load()
    except KernelBuildError:
        return reference.linear_w4a16


def load() -> Callable[..., Tensor]:
    """Build or load the kernel of four bits; the op's function, which finds that of eight when needed."""
    check_capability("linear_w4a16")
    find_kernel()
    return linear_w4a16


def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int,
    shuffled: bool = False,
    silu_and_mul: bool = False,
) -> Tensor:
    """The op, as op.py states it."""
    if not shuffled or group_shift(group, x.shape[1]) is None or x.numel() == 0:
        return find_triton()(x, weight, scale, zero, bias, group, shuffled, silu_and_mul)
    parts = _aligned(weight), _aligned(scale), None if zero is None else _aligned(zero)
    is_gated = silu_and_mul and weight.shape[0] % (2 * TILE) == 0
    out = _multiply(x, *parts, bias, group, is_gated)
    return torch.ops.lamina.silu_and_mul.default(out) if silu_and_mul and not is_gated else out


def _aligned(part: Tensor) -> Tensor:
    return part if part.data_ptr() % BULK == 0 else part.clone()


def _multiply(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int,
    gated: bool,
) -> Tensor:
    n, k = weight.shape[0], x.shape[1]
    kind: Kind = "gated" if gated else "linear"
    config = config_of(kind, x.shape[0], n, k, x.dtype, group, x.device, bits_of(weight))
    if config is not None:
        return launch(x, weight, scale, zero, bias, group, config, gated=gated)
    return by_library(x, weight, scale, zero, bias, group, gated=gated)


def by_library(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int,
    *,
    gated: bool = False,
) -> Tensor:
    """The product by the library, of weights that are written out for it."""
    out = F.linear(x, write_out(weight, scale, zero, group), bias)
    return torch.ops.lamina.silu_and_mul.default(out) if gated else out


def launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int,
    config: GemmConfig,
    *,
    gated: bool = False,
) -> Tensor:
    """The product by the kernel of this configuration, with as many of its stages as fit."""
    x = x if fits(x) else x.contiguous().clone()
    bias = None if bias is None else bias.contiguous()
    n, k = weight.shape[0], x.shape[1]
    out = x.new_empty((x.shape[0], n // 2 if gated else n))
    warpgroups, tokens, _, split_k, *_ = config
    limits = warpgroups, tokens, k, group, split_k, MAX_SHARED
    most = most_stages(*limits, zero=zero is not None, bits=bits_of(weight))
    config = config._replace(stages=min(config.stages, most or 2))
    if zero is not None or bits_of(weight) != 4 or not group == PLAIN_GROUP < k:
        config = general(config)  # sites do not say whether there are zero points
    _call(x, weight, scale, zero, bias, out, group, config, gated=gated)
    return out


def write_out(weight: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """The weights [out, in], of scale's dtype, of shuffled ones."""
    out = scale.new_empty((weight.shape[0], columns_of(weight)))
    _call(None, weight, scale, zero, None, out, group, NO_CONFIG, gated=False)
    return out


def _call(
    x: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    group: int,
    config: GemmConfig,
    *,
    gated: bool,
) -> None:
    k, (num_tokens, stride) = columns_of(weight), (0, 0) if x is None else (x.shape[0], x.stride(0))
    shift = group_shift(group, k)
    assert shift is not None, f"groups of {group}"
    pointers = (0 if part is None else part.data_ptr() for part in (x, weight, scale, zero, bias, out))
    find_kernel(bits_of(weight))(
        out.device,
        *pointers,
        *(num_tokens, weight.shape[0], k, stride),
        *(scale.shape[1], shift, gated),
        *(*config, DTYPES[out.dtype]),
    )


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=NARROW)
