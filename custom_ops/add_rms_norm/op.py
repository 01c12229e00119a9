"""lamina::add_rms_norm, the residual sum and its normalisation in one step."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from ..rms_norm.op import check_norm
from . import _cuda, reference


def add_rms_norm(
    x: Tensor,  # [num_tokens, hidden]
    residual: Tensor,  # like x
    weight: Tensor,  # [hidden]
    eps: float,
    unrounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual, rounded to x's dtype before it is normalised, or after.

    unrounded: the norm is of the sum as float32 has it; what is handed on is rounded either way.
    """
    result: tuple[Tensor, Tensor] = torch.ops.lamina.add_rms_norm.default(x, residual, weight, eps, unrounded)
    return result


def fake_sum_and_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unrounded: bool = False
) -> tuple[Tensor, Tensor]:
    """The shapes and dtypes of a sum's norm and the sum."""
    return x.new_empty(x.shape), x.new_empty(x.shape)


def check_sum_and_norm(op: str, x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Refuse a weight or a residual that does not fit x."""
    check_norm(op, x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        got = f"residual is {list(residual.shape)} {residual.dtype}"
        raise ShapeError(f"{op}: {got}; wanted x's {list(x.shape)} {x.dtype}")


def _check(x: Tensor, residual: Tensor, weight: Tensor, eps: float, unrounded: bool = False) -> None:
    check_sum_and_norm("add_rms_norm", x, residual, weight)


define_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool unrounded=False)"
    " -> (Tensor, Tensor)",
    fake=fake_sum_and_norm,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("add_rms_norm", dtypes=_cuda.PROVIDER.dtypes),
        Provider(name="reference", load=lambda: reference.add_rms_norm),
    ),
)
