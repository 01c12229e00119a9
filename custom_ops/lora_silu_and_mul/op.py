"""lamina::lora_silu_and_mul, what adapters add to a projection of gate and up, and the gate behind it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from ..lora.op import check_adapted
from . import _composed, _cuda, reference


def lora_silu_and_mul(
    y: Tensor,  # [num_tokens, out_features], gate and up, each half of them
    x: Tensor,  # all others as lora has them
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],  # parts that end where the gate does
) -> Tensor:
    """silu_and_mul(lora(y, x, a, b, scales, slots, rows)), [num_tokens, out_features / 2].

    Whatever is rounded by those ops one after the other is rounded here. A token's bits depend on it and on
    its slot alone. In a CUDA graph a, b, scales and slots may be read before the kernels ahead have ended.
    """
    result: Tensor = torch.ops.lamina.lora_silu_and_mul.default(y, x, a, b, scales, slots, rows)
    return result


def _fake(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
) -> Tensor:
    return y.new_empty((y.shape[0], y.shape[1] // 2))


def _check(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
) -> None:
    check_adapted("lora_silu_and_mul", y, x, a, b, scales, slots, rows)
    if y.shape[1] % 2:
        raise ShapeError(f"lora_silu_and_mul: y is {list(y.shape)}; wanted an even number of outputs")


define_op(
    "lora_silu_and_mul(Tensor y, Tensor x, Tensor a, Tensor b, Tensor scales, Tensor slots, int[] rows)"
    " -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        Provider(name="composed", load=lambda: _composed.lora_silu_and_mul),
        Provider(name="reference", load=lambda: reference.lora_silu_and_mul),
    ),
)
