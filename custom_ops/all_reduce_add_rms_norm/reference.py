"""The formula of lamina::all_reduce_add_rms_norm."""

from torch import Tensor

from ..add_rms_norm.reference import add_rms_norm
from ..all_reduce.reference import all_reduce


def all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, world_size: int, unrounded: bool = False
) -> tuple[Tensor, Tensor]:
    """The residual sum of what x comes to over all ranks, normed, and that sum."""
    return add_rms_norm(all_reduce(x, world_size), residual, weight, eps, unrounded)
