"""The CUDA kernels of lamina::scaled_linear; in FP8 torch's GEMM wherever that was faster."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...common.logging import get_logger, log_once
from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.fp8 import FP8
from .._shared.quantized import FORMATS, INT8, NARROW
from .._shared.registry import Provider
from ..linear._cuda import check_capability
from ..linear.choices import (
    MANY,
    GemmConfig,
    Method,
    Site,
    bucket_of_bytes,
    cached_until_adopted,
    choose,
    device_name_of,
    guess,
    kept_as,
    name_of,
    processors_of,
)
from .reference import scaled_linear as formula

EVEN = 16  # elements: rows that TMA takes start, and end, at multiples of 16 bytes
MOST_WHOLE = 1 << 17  # columns whose products int32 sums up: of -128 by 127
SCALED_MM = torch.ops.aten._scaled_mm.default
logger = get_logger("custom_ops")


@functools.cache
def find_kernel(dtype: torch.dtype) -> CudaKernel:
    """Build or load the kernel of operands in a format, once."""
    return CudaKernel("scaled_linear", "19q", source_of(dtype))  # struct ScaledLinearArguments


def source_of(dtype: torch.dtype) -> str:
    """The file of a kernel's library, of which there is one a format."""
    return "int8" if dtype == INT8 else "cuda"


def load() -> Callable[..., Tensor]:
    """Build or load the kernel of FP8; the op's function, which finds that of int8 when it is needed."""
    check_capability("scaled_linear")
    find_kernel(FP8)
    return scaled_linear


def scaled_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The op, as op.py states it."""
    x = x.contiguous()
    config = config_of(x.shape[0], weight, scale, dtype) if x.data_ptr() % EVEN == 0 else None
    multiply = library if config is None else functools.partial(launch, config=config)
    return multiply(x, x_scale, weight, scale, bias, dtype)


def launch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: GemmConfig,
) -> Tensor:
    """The op by the kernel of this configuration; the tensors must fit."""
    out = x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)
    call(find_kernel(x.dtype), x, x_scale, weight, scale, bias, out, config)
    return out


def call(
    kernel: CudaKernel,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: GemmConfig,
) -> None:
    """Launch a kernel that takes struct ScaledLinearArguments; the tensors must fit."""
    strides = (1, 0, 0) if scale.dim() == 1 else (*x_scale.stride(), scale.shape[1])
    bias = None if bias is None else bias.contiguous()
    kernel(
        x.device,
        *(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(x_scale.contiguous().data_ptr() if scale.dim() == 1 else x_scale.data_ptr(), scale.data_ptr()),
        *(out.data_ptr(), x.shape[0], *weight.shape, *strides, *config, DTYPES[out.dtype]),
    )


def library(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The op by torch's GEMM in FP8 where that takes the tensors, else by the formula in float32."""
    if not has_library(x.shape[0], weight, scale, dtype):
        if dtype != torch.float64:  # which verification asks for, and no kernel is meant for
            why = f"weights {list(weight.shape)} with scales {list(scale.shape)} in {dtype}"
            log_once(logger, 30, f"scaled_linear of {why} is multiplied in float32: no kernel takes it")
        return formula(x, x_scale, weight, scale, bias, dtype)
    out: Tensor = SCALED_MM(x, weight.t(), x_scale[:, None], scale[None], bias, None, dtype)
    return out


def has_library(num_tokens: int, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's GEMM in FP8 takes such tensors: bfloat16 by a scale a row, of whole 16 bytes."""
    is_even = num_tokens > 0 and weight.shape[0] % EVEN == 0 and weight.shape[1] % EVEN == 0
    return is_even and weight.dtype == FP8 and scale.dim() == 1 and dtype == torch.bfloat16


def config_of(
    num_tokens: int, weight: Tensor, scale: Tensor, dtype: torch.dtype, *, needs_ours: bool = False
) -> GemmConfig | None:
    """The configuration that serves so many rows; None where the library, or the formula, does.

    needs_ours: the library would not do, so that a configuration is found wherever the kernel takes these.
    """
    fits = weight.data_ptr() % EVEN == 0 and weight.shape[1] % EVEN == 0 and weight.numel() > 0
    is_summed = weight.dtype == FP8 or weight.shape[1] <= MOST_WHOLE
    if not fits or not is_summed or num_tokens == 0 or dtype not in NARROW:
        return None
    is_served = has_library(num_tokens, weight, scale, dtype) and not needs_ours
    (n, k), weights = weight.shape, kept_as(weight.dtype, scale.dim())
    bucket = bucket_of_bytes(num_tokens)
    site = Site(kind="linear", num_tokens=bucket, n=n, k=k, dtype=name_of(dtype), weights=weights)
    return _config_of(site, weight.device, is_served)


@cached_until_adopted
def _config_of(site: Site, device: torch.device, has_library: bool) -> GemmConfig | None:
    """What was measured; where nothing was, or there is no library to be slower than, a guess.

    Many rows of which nothing is known are the library's.
    """
    choice = choose(site, device_name_of(device, getattr(torch, site.dtype)))
    assert not isinstance(choice.kernel, Method), "a method of CPUs"
    if choice.kernel is not None or (has_library and (choice.is_measured or site.num_tokens in MANY)):
        return choice.kernel
    return guess(site, processors_of(device))


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=FORMATS)
