"""lamina::linear_silu_and_mul, the projection to gate and up and the gate behind it in one step."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from ..linear.op import check_projection
from . import _composed, _cuda, reference


def linear_silu_and_mul(
    x: Tensor,  # [num_tokens, in_features]
    weight: Tensor,  # [2 * out_features, in_features]: the gate's rows, then as many of up
    bias: Tensor | None = None,  # [2 * out_features]
    batch_invariant: bool = False,  # as of linear
) -> Tensor:
    """silu_and_mul(linear(x, weight, bias)), [num_tokens, out_features].

    The projection and silu of the gate are rounded, as by these ops one after another.
    """
    result: Tensor = torch.ops.lamina.linear_silu_and_mul.default(x, weight, bias, batch_invariant)
    return result


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> None:
    check_projection("linear_silu_and_mul", x, weight, bias)
    if weight.shape[0] % 2:
        got = f"weight is {list(weight.shape)}"
        raise ShapeError(f"linear_silu_and_mul: {got}; wanted as much gate as up")


define_op(
    "linear_silu_and_mul(Tensor x, Tensor weight, Tensor? bias=None, bool batch_invariant=False) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        _composed.PROVIDER,
        Provider(name="reference", load=lambda: reference.linear_silu_and_mul),
    ),
)
