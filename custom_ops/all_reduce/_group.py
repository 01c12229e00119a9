"""lamina::all_reduce as the group of ranks does it: by gloo, by NCCL, between threads."""

from torch import Tensor

from .group import group_of


def all_reduce(x: Tensor, world_size: int) -> Tensor:
    """The op, as op.py states it."""
    return group_of(world_size).all_reduce(x.contiguous())
