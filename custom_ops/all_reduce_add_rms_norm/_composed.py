"""lamina::all_reduce_add_rms_norm as the two ops that it stands for."""

from torch import Tensor

from ..add_rms_norm.op import add_rms_norm
from ..all_reduce.op import all_reduce


def all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, world_size: int, unrounded: bool = False
) -> tuple[Tensor, Tensor]:
    """The op, as op.py states it."""
    return add_rms_norm(all_reduce(x, world_size), residual, weight, eps, unrounded)
