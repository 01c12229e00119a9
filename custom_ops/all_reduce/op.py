"""lamina::all_reduce, the sum of a tensor over the ranks that a model is spread over."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from . import _cuda, _group, reference


def all_reduce(x: Tensor, world_size: int) -> Tensor:
    """A new tensor like x: the sum of every rank's x, in the order of ranks, with the same bits on each.

    The sum is made in float32 or wider and rounded once to x's dtype. Which ranks those are is known to the
    process (group.set_group), so that the graphs of all ranks are the same.
    """
    result: Tensor = torch.ops.lamina.all_reduce.default(x, world_size)
    return result


def _fake(x: Tensor, world_size: int) -> Tensor:
    return x.new_empty(x.shape)


def _check(x: Tensor, world_size: int) -> None:
    if not x.dtype.is_floating_point:
        raise ShapeError(f"all_reduce: x is {list(x.shape)} {x.dtype}; wanted a floating dtype")
    if world_size < 1:
        raise ShapeError(f"all_reduce: world_size is {world_size}; wanted 1 or more")


define_op(
    "all_reduce(Tensor x, int world_size) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        Provider(name="group", load=lambda: _group.all_reduce),
        _cuda.ONE_SHOT,
        _cuda.TWO_SHOT,
        Provider(name="reference", load=lambda: reference.all_reduce),
    ),
)
