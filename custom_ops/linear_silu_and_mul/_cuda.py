"""The CUDA kernels of lamina::linear_silu_and_mul: GEMM and gate in one launch where that won."""

import functools
from collections.abc import Callable

from torch import Tensor

from .._shared.cuda_kernel import DEVICES, DTYPES, CudaKernel
from .._shared.registry import Provider
from ..linear._cuda import PROVIDER as LINEAR
from ..linear._cuda import check_capability, config_of, config_of_one_order
from ..linear.choices import GemmConfig
from ._composed import linear_silu_and_mul as apart


@functools.cache
def find_kernel() -> CudaKernel:
    """Build or load the kernel, once."""
    return CudaKernel("linear_silu_and_mul", "16q")  # struct LinearSiluAndMulArguments


def load() -> Callable[..., Tensor]:
    """Build or load the kernel; the op's function on it."""
    check_capability("linear_silu_and_mul")
    find_kernel()
    return linear_silu_and_mul


def linear_silu_and_mul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False
) -> Tensor:
    """The op, as op.py states it."""
    find = config_of_one_order if batch_invariant else config_of
    config = find("gated", x, weight)
    if config is None:
        return apart(x, weight, bias, batch_invariant)
    return launch(x, weight, bias, config, batch_invariant)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: GemmConfig, splits_all: bool = False
) -> Tensor:
    """silu_and_mul(x @ weight.T + bias) by the kernel of this configuration; the tensors must fit."""
    out = x.new_empty((x.shape[0], weight.shape[0] // 2))
    find_kernel()(
        x.device,
        *(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()),
        *(x.shape[0], *weight.shape, x.stride(0)),
        *(*config, splits_all, DTYPES[x.dtype]),
    )
    return out


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=LINEAR.dtypes)
