"""The CUDA kernels of lamina::add_rms_norm_linear: the norm's, then GEMM and gate in one where that won.

A norm made anew by every block of the GEMM was measured and lost: a norm in a launch of its own runs while
the GEMM's weights are being loaded already.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.registry import Provider
from ..linear._cuda import PROVIDER as LINEAR
from ..linear._cuda import check_capability, config_of, config_of_one_order
from ..linear.choices import GemmConfig
from . import _composed

OPS = torch.ops.lamina


@functools.cache
def find_kernel() -> CudaKernel:
    """Build or load the kernel, once."""
    return CudaKernel("add_rms_norm_linear", "16q")  # struct AddRmsNormLinearArguments


def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """Build or load the kernel; the op's function on it."""
    check_capability("add_rms_norm_linear")
    find_kernel()
    return add_rms_norm_linear


def add_rms_norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    silu_and_mul: bool,
    scale: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """The op, as op.py states it."""
    if scale is not None:
        arguments = x, residual, norm_weight, eps, weight, bias, silu_and_mul, scale
        return _composed.add_rms_norm_linear(*arguments)
    normed, total = OPS.add_rms_norm.default(x, residual, norm_weight, eps)
    find = config_of_one_order if batch_invariant else config_of
    config = find("gated", normed, weight) if silu_and_mul else None
    if config is not None:
        return launch(normed, weight, bias, config, batch_invariant), total
    out = OPS.linear.default(normed, weight, bias, batch_invariant)
    return OPS.silu_and_mul.default(out) if silu_and_mul else out, total


def launch(
    normed: Tensor, weight: Tensor, bias: Tensor | None, config: GemmConfig, splits_all: bool = False
) -> Tensor:
    """silu_and_mul(normed @ weight.T + bias) by the kernel of this configuration; the tensors must fit."""
    out = normed.new_empty((normed.shape[0], weight.shape[0] // 2))
    find_kernel()(
        normed.device,
        *(normed.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()),
        *(normed.shape[0], *weight.shape, normed.stride(0)),
        *(*config, splits_all, DTYPES[normed.dtype]),
    )
    return out


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=LINEAR.dtypes)
