"""lamina::all_reduce_add_rms_norm, a sum over ranks, the residual sum and its norm in one step."""

import torch
from torch import Tensor

from .._shared.library import define_op
from .._shared.registry import Provider
from ..add_rms_norm.op import check_sum_and_norm
from . import _composed, _cuda, reference


def all_reduce_add_rms_norm(
    x: Tensor,  # [num_tokens, hidden], of this rank
    residual: Tensor,  # like x, the same on every rank
    weight: Tensor,  # [hidden]
    eps: float,
    world_size: int,
    unrounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """add_rms_norm(all_reduce(x, world_size), residual, weight, eps, unrounded), with the bits of both."""
    result: tuple[Tensor, Tensor] = torch.ops.lamina.all_reduce_add_rms_norm.default(
        x, residual, weight, eps, world_size, unrounded
    )
    return result


def _fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, world_size: int, unrounded: bool = False
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _check(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, world_size: int, unrounded: bool = False
) -> None:
    check_sum_and_norm("all_reduce_add_rms_norm", x, residual, weight)


define_op(
    "all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, int world_size,"
    " bool unrounded=False) -> (Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        Provider(name="composed", load=lambda: _composed.all_reduce_add_rms_norm),
        _cuda.ONE_SHOT,
        Provider(name="reference", load=lambda: reference.all_reduce_add_rms_norm),
    ),
)
