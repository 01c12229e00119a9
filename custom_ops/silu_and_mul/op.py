"""lamina::silu_and_mul, the gated activation of the MLP."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cuda, reference


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [num_tokens, 2 * intermediate]; silu is rounded before the product."""
    result: Tensor = torch.ops.lamina.silu_and_mul.default(gate_up)
    return result


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _check(gate_up: Tensor) -> None:
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ShapeError(f"silu_and_mul: gate_up is {list(gate_up.shape)}; wanted an even last dimension")


define_op(
    "silu_and_mul(Tensor gate_up) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("silu_and_mul", dtypes=_cuda.PROVIDER.dtypes),
        Provider(name="reference", load=lambda: reference.silu_and_mul),
    ),
)
