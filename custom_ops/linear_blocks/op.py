"""lamina::linear_blocks, a projection by weights in GGUF's blocks, of activations quantized to int8."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from . import _cpu, reference
from .runs import Run, columns_of, num_bytes, num_rows_of, runs_of


def linear_blocks(
    x: Tensor,  # [num_tokens, in_features]
    weight: Tensor,  # uint8 [out_features, bytes of a row] as layout.interleave has them, or as runs.py says
    bias: Tensor | None,  # [out_features] of x's dtype
    kind: str,  # of the blocks, a key of layout.KINDS, or rows of several, "Q4_K:5120+Q6_K:1024"
    silu_and_mul: bool = False,
) -> Tensor:
    """x @ w.T + bias, [num_tokens, out_features], of x's dtype; with silu_and_mul that of it.

    x is quantized first. Each 32 columns of a row have scale = largest / 127 and values x * (127 / largest)
    rounded to nearest, ties to even, in float32, and 0 where the largest is below 2^-120; where a column is
    not finite, the row of the result is NaN. Products of whole numbers and their sums over the columns that
    share a scale are exact. Such a sum, times the product of both scales, and a minimum of the weights, times
    the scale of x and the sum of its values, are added in float32 in the order of the columns, then the bias,
    and the result is rounded once. A row's bits depend on no other row of x. With silu_and_mul the rows of
    the weight are those of a gate, then as many of what it gates, and the result is silu_and_mul of the
    rounded sums, [num_tokens, out_features / 2].
    """
    result: Tensor = torch.ops.lamina.linear_blocks.default(x, weight, bias, kind, silu_and_mul)
    return result


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, silu_and_mul: bool = False) -> Tensor:
    rows = num_rows_of(weight, kind)
    return x.new_empty((x.shape[0], rows // 2 if silu_and_mul else rows))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, silu_and_mul: bool = False) -> None:
    try:
        runs = runs_of(kind) or (Run(kind, 1),)
    except ValueError as error:
        raise ShapeError(f"linear_blocks: {error}") from None
    columns, is_of_one = columns_of(runs), len(runs) == 1
    size, dims = num_bytes(runs, columns), (2 if is_of_one else 1)
    fits = x.dim() == 2 and weight.dim() == dims and x.shape[1] % columns == 0
    if not fits or weight.shape[-1] != num_bytes(runs, x.shape[1]):
        got = f"x is {list(x.shape)}, weight {list(weight.shape)}"
        rows = "out, " if is_of_one else ""
        wanted = f"[T, in] of blocks of {columns} columns, and [{rows}{size} * in / {columns}]"
        raise ShapeError(f"linear_blocks: {got}; wanted {wanted} in {kind}")
    if weight.dtype != torch.uint8 or not weight.is_contiguous():
        raise ShapeError(f"linear_blocks: weight is {weight.dtype}; wanted torch.uint8, contiguous")
    _check_rows(num_rows_of(weight, kind), x, bias, silu_and_mul)


def _check_rows(num_rows: int, x: Tensor, bias: Tensor | None, silu_and_mul: bool) -> None:
    if bias is not None and (bias.shape != (num_rows,) or bias.dtype != x.dtype):
        got = f"bias is {bias.dtype} {list(bias.shape)}"
        raise ShapeError(f"linear_blocks: {got}; wanted x's {x.dtype} [{num_rows}]")
    if silu_and_mul and num_rows % 2:
        raise ShapeError(
            f"linear_blocks: weight has {num_rows} rows; wanted as many of a gate as of what it gates"
        )


define_op(
    "linear_blocks(Tensor x, Tensor weight, Tensor? bias, str kind, bool silu_and_mul=False) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cpu.PROVIDER,
        Provider(name="reference", load=lambda: reference.linear_blocks),
    ),
)
