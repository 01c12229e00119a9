"""lamina::lora_add_rms_norm, what adapters add to a projection, and the residual sum and norm behind it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._shared.library import define_op
from .._shared.registry import Provider
from ..add_rms_norm.op import check_sum_and_norm
from ..lora.op import check_adapted
from . import _composed, _cuda, reference


def lora_add_rms_norm(
    y: Tensor,  # [num_tokens, hidden]
    x: Tensor,  # all up to rows as lora has them
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
    residual: Tensor,  # like y
    weight: Tensor,  # [hidden]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """add_rms_norm(lora(y, x, a, b, scales, slots, rows), residual, weight, eps).

    Whatever is rounded by those ops one after the other is rounded here, but for the order of the sum inside
    the mean the bits are theirs, and a token's depend on it and on its slot alone. In a CUDA graph a, b,
    scales, slots and weight may be read before the kernels ahead have ended.
    """
    result: tuple[Tensor, Tensor] = torch.ops.lamina.lora_add_rms_norm.default(
        y, x, a, b, scales, slots, rows, residual, weight, eps
    )
    return result


def _fake(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
    residual: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(y.shape)


def _check(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
    residual: Tensor,
    weight: Tensor,
    eps: float,
) -> None:
    check_adapted("lora_add_rms_norm", y, x, a, b, scales, slots, rows)
    check_sum_and_norm("lora_add_rms_norm", y, residual, weight)


define_op(
    "lora_add_rms_norm(Tensor y, Tensor x, Tensor a, Tensor b, Tensor scales, Tensor slots, int[] rows,"
    " Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        Provider(name="composed", load=lambda: _composed.lora_add_rms_norm),
        Provider(name="reference", load=lambda: reference.lora_add_rms_norm),
    ),
)
