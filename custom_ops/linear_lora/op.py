"""lamina::linear_lora, a projection and what low-rank adapters add to it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._shared.library import define_op
from .._shared.registry import Provider
from ..linear.op import check_projection
from ..lora.op import check_adapters
from . import _composed, _overlapped, reference


def linear_lora(
    x: Tensor,  # [num_tokens, in_features]
    weight: Tensor,  # [out_features, in_features]
    bias: Tensor | None,  # [out_features]
    a: Tensor,  # this one and those that follow as of lora
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
    batch_invariant: bool = False,  # as of linear
) -> Tensor:
    """lora(linear(x, weight, bias), x, ...), [num_tokens, out_features].

    The projection is rounded, as by these ops one after another. In a CUDA graph a, b, scales and slots may
    be read before the kernels ahead have ended, as lora's.
    """
    result: Tensor = torch.ops.lamina.linear_lora.default(
        x, weight, bias, a, b, scales, slots, rows, batch_invariant
    )
    return result


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
    batch_invariant: bool = False,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
    batch_invariant: bool = False,
) -> None:
    check_projection("linear_lora", x, weight, bias)
    check_adapters("linear_lora", (x.shape[0], weight.shape[0]), x.dtype, x, a, b, scales, slots, rows)


define_op(
    "linear_lora(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, Tensor scales, Tensor slots, "
    "int[] rows, bool batch_invariant=False) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _overlapped.PROVIDER,
        _composed.PROVIDER,
        Provider(name="reference", load=lambda: reference.linear_lora),
    ),
)
