"""lamina::linear, the GEMM of every projection."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cpu, _cuda, reference


def linear(
    x: Tensor,  # [num_tokens, in_features]
    weight: Tensor,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
    batch_invariant: bool = False,
) -> Tensor:
    """x @ weight.T + bias, [num_tokens, out_features].

    With batch_invariant the bits of a row are the same whatever other rows there are, and how many.
    """
    result: Tensor = torch.ops.lamina.linear.default(x, weight, bias, batch_invariant)
    return result


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> None:
    check_projection("linear", x, weight, bias)


def check_projection(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuse what is no projection of tokens, in the name of an op."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        got = f"x is {list(x.shape)}, weight {list(weight.shape)}"
        raise ShapeError(f"{op}: {got}; wanted [T, in] and [out, in]")
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        got = f"x is {x.dtype}, weight {weight.dtype}, bias {None if bias is None else bias.dtype}"
        raise ShapeError(f"{op}: {got}; wanted one dtype")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"{op}: bias is {list(bias.shape)}; wanted [{weight.shape[0]}]")


define_op(
    "linear(Tensor x, Tensor weight, Tensor? bias=None, bool batch_invariant=False) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("linear", dtypes=_cuda.PROVIDER.dtypes),
        _cpu.PROVIDER,
        Provider(name="reference", load=lambda: reference.linear),
    ),
)
