"""The CUDA kernel of lamina::add_rms_norm_linear: one launch for few rows, else as many as were faster."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..cuda_kernel import DEVICES, DTYPES, CudaKernel
from ..linear._cuda import PROVIDER as LINEAR
from ..linear._cuda import check_card, cut_of, fits
from ..linear.choices import Cut
from ..registry import Provider

OPS = torch.ops.lamina


@functools.cache
def find_kernel() -> CudaKernel:
    """The compiled kernel."""
    return CudaKernel("add_rms_norm_linear", "12qd7q")  # struct AddRmsNormLinearArguments


def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel behind the op's signature."""
    check_card("add_rms_norm_linear")
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
) -> tuple[Tensor, Tensor]:
    """The op's signature."""
    whole = fits(residual) and fits(norm_weight[None])
    cut = cut_of("norm_gated" if silu_and_mul else "norm", x, weight) if whole else None
    if cut is not None:
        return launch(x, residual, norm_weight, eps, weight, bias, silu_and_mul, cut)
    normed, total = OPS.add_rms_norm.default(x, residual, norm_weight, eps)
    return behind_norm(normed, weight, bias, silu_and_mul), total


def launch(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    cut: Cut,
) -> tuple[Tensor, Tensor]:
    """All of it for tensors that fit, cut as told."""
    total = x.new_empty(x.shape)
    return _launch((x, residual, norm_weight, weight, bias), total, eps, gated, cut), total


def behind_norm(normed: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """The product of a norm that has been made, and the gate behind it."""
    cut = cut_of("gated", normed, weight) if gated else None
    if cut is not None:
        return gate(normed, weight, bias, cut)
    product: Tensor = OPS.linear.default(normed, weight, bias)
    result: Tensor = OPS.silu_and_mul.default(product) if gated else product
    return result


def gate(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    """The gated product of x for tensors that fit, cut as told."""
    return _launch((x, None, None, weight, bias), None, 0.0, True, cut)


def _launch(
    given: tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None],
    total: Tensor | None,
    eps: float,
    gated: bool,
    cut: Cut,
) -> Tensor:
    x, residual, _, weight, _ = given
    out = x.new_empty((x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0]))
    find_kernel()(
        x.device,
        *(0 if tensor is None else tensor.data_ptr() for tensor in (*given, out, total)),
        *(x.shape[0], *weight.shape, x.stride(0), 0 if residual is None else residual.stride(0)),
        *(eps, gated, *cut, DTYPES[x.dtype]),
    )
    return out


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=LINEAR.dtypes)
