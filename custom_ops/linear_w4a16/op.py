"""lamina::linear_w4a16, a projection with weights of four bits, or eight, and a scale a group of columns."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cpu, _cuda, reference
from .layout import TILE, columns_of

WHOLE_ROW = -1  # a group that is all columns


def linear_w4a16(
    x: Tensor,  # [num_tokens, in_features]
    weight: Tensor,  # [out_features, in_features / 2] uint8, the even column in the lower four bits; of
    # eight bits (w8a16) [out_features, in_features] int8
    scale: Tensor,  # [out_features, ceil(in_features / group)] of x's dtype
    zero: Tensor | None,  # like scale: what the number 0 stands for, 0 where it is absent
    bias: Tensor | None,  # [out_features] of x's dtype
    group: int,  # columns that share a scale, an even number; -1: all
    shuffled: bool = False,
    silu_and_mul: bool = False,
) -> Tensor:
    """x @ w.T + bias, [num_tokens, out_features], of x's dtype; with silu_and_mul that of it.

    w[n, k] = q[n, k] * scale[n, g] + zero[n, g], rounded once to x's dtype, where q is the int8 of a weight,
    or its four bits less 8, and g = k // group. Multiply-adds are in float32 (float64 for float64), and the
    sum with its bias is rounded once. With silu_and_mul the rows are those of a gate, then as many of what it
    gates, and the result is silu_and_mul of the rounded sums, [num_tokens, out_features / 2].

    `shuffled` tells how weight, scale and zero lie: by rows, or as shuffle and shuffle_groups of layout.py
    have them for the CUDA kernel.
    """
    result: Tensor = torch.ops.lamina.linear_w4a16.default(
        x, weight, scale, zero, bias, group, shuffled, silu_and_mul
    )
    return result


def num_groups(in_features: int, group: int) -> int:
    """How many groups the columns of a row make."""
    return 1 if group == WHOLE_ROW else -(-in_features // group)


def _fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int,
    shuffled: bool = False,
    silu_and_mul: bool = False,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2 if silu_and_mul else weight.shape[0]))


def _check(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int,
    shuffled: bool = False,
    silu_and_mul: bool = False,
) -> None:
    if weight.dtype not in (torch.uint8, torch.int8):
        raise ShapeError(f"linear_w4a16: weight is {weight.dtype}; wanted torch.uint8 or torch.int8")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != columns_of(weight):
        got = f"x is {list(x.shape)}, weight {list(weight.shape)} {weight.dtype}"
        raise ShapeError(f"linear_w4a16: {got}; wanted [T, in] and uint8 [out, in / 2] or int8 [out, in]")
    if group != WHOLE_ROW and (group <= 0 or group % 2):
        raise ShapeError(f"linear_w4a16: group is {group}; wanted an even number above 0, or {WHOLE_ROW}")
    _check_others(x, weight, scale, zero, bias, group)
    n, k = weight.shape[0], x.shape[1]
    if shuffled and (n % TILE or k % TILE):
        raise ShapeError(f"linear_w4a16: [{n}, {k}] is shuffled; wanted multiples of {TILE}")
    if silu_and_mul and n % 2:
        raise ShapeError(f"linear_w4a16: weight has {n} rows; wanted as many of a gate as of what it gates")


def _check_others(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group: int
) -> None:
    n, groups = weight.shape[0], [weight.shape[0], num_groups(x.shape[1], group)]
    wanted = {"scale": groups, "zero": groups, "bias": [n]}
    for name, given in (("scale", scale), ("zero", zero), ("bias", bias)):
        if given is None:
            continue
        if list(given.shape) != wanted[name] or given.dtype != x.dtype:
            got = f"{name} is {given.dtype} {list(given.shape)}"
            raise ShapeError(f"linear_w4a16: {got}; wanted x's {x.dtype} {wanted[name]}")
    for name, given in (("weight", weight), ("scale", scale), ("zero", zero)):
        if given is not None and not given.is_contiguous():
            raise ShapeError(f"linear_w4a16: {name} is not contiguous; wanted it so")


define_op(
    "linear_w4a16(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? bias, int group,"
    " bool shuffled=False, bool silu_and_mul=False) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("linear_w4a16", dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32})),
        _cpu.PROVIDER,
        Provider(name="reference", load=lambda: reference.linear_w4a16),
    ),
)
