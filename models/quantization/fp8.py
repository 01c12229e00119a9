"""Projections in float8: a number of e4m3 for each weight, a scale for each row or 128 columns of it."""

from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import Tensor

from ... import custom_ops
from ...common.errors import UnsupportedError
from ...custom_ops._shared.fp8 import LARGEST, divided
from .scheme import HEAD, Parts, QuantScheme, Shape, cut_numbers, largest_of, register_scheme

BLOCK = 128  # rows, and columns, of a block with one scale


def by_rows(shape: Shape, dtype: torch.dtype) -> Mapping[str, tuple[Shape, torch.dtype]]:
    """The numbers [out, in], and the scales [out]."""
    return {"": (shape, torch.float8_e4m3fn), "scale": (shape[:1], torch.float32)}


def by_blocks(shape: Shape, dtype: torch.dtype) -> Mapping[str, tuple[Shape, torch.dtype]]:
    """The numbers [out, in], and a scale for each 128 columns of a row; the last block may be short."""
    blocks = -(-shape[1] // BLOCK)
    return {"": (shape, torch.float8_e4m3fn), "scale": ((shape[0], blocks), torch.float32)}


def store_rows(rows: Tensor, parts: Parts) -> None:
    """Each row by the scale that its largest weight gives. LoadError where that is not finite."""
    values, scale = parts
    scale.copy_(divided(largest_of(rows), LARGEST))
    values.copy_(_rounded(rows, scale[:, None]))


def store_blocks(rows: Tensor, parts: Parts) -> None:
    """Each 128 columns of a row by the scale that their largest weight gives. LoadError as for rows."""
    values, scale = parts
    blocks = range(0, rows.shape[1], BLOCK)
    peaks = torch.stack([largest_of(rows[:, first : first + BLOCK]) for first in blocks], dim=1)
    scale.copy_(divided(peaks, LARGEST))
    values.copy_(_rounded(rows, expanded(scale, rows.shape[1])))


def share_rows(columns: int, count: int) -> QuantScheme:
    """The same: a row's scale is that of its parts."""
    return FP8


def share_blocks(columns: int, count: int) -> QuantScheme:
    """The same scheme: of whole blocks, or of parts of one. UnsupportedError for what cuts a block in two."""
    if count % BLOCK and BLOCK % count:
        raise UnsupportedError(
            f"quantization is 'fp8_block', and ranks are to have {count} of {columns} columns each; "
            f"wanted whole blocks of {BLOCK}, or equal parts of one"
        )
    return FP8_BLOCK


def cut_blocks(parts: Parts, columns: int, first: int, count: int) -> Parts:
    """Columns of the numbers, and the scales of the blocks that they are of."""
    values, scale = parts
    return values.narrow(1, first, count), scale[:, first // BLOCK : -(-(first + count) // BLOCK)]


def restore(parts: Parts) -> Tensor:
    """Each number by the scale of its row, or of its block."""
    values, scale = parts
    return values.to(torch.float32) * (
        scale[:, None] if scale.dim() == 1 else expanded(scale, values.shape[1])
    )


def multiply(x: Tensor, parts: Parts, bias: Tensor | None, *, bound: float | None = None) -> Tensor:
    """lamina::linear_w8a8; what is beyond +-bound of x counts as the bound."""
    values, scale = parts
    return custom_ops.linear_w8a8(x if bound is None else x.clamp(-bound, bound), values, scale, bias)


def expanded(scale: Tensor, columns: int) -> Tensor:
    """The scale of each weight [n, columns], of one [n, blocks] for each 128 columns."""
    return scale.repeat_interleave(BLOCK, dim=1)[:, :columns]


def _rounded(rows: Tensor, scale: Tensor) -> Tensor:
    steps = rows / torch.where(scale > 0, scale, 1.0)
    return steps.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


FP8 = QuantScheme(
    name="fp8",
    kept="in float8 (e4m3), a scale a row",
    devices=frozenset({"cpu", "cuda"}),
    tensors=by_rows,
    store=store_rows,
    restore=restore,
    multiply=multiply,
    op="scaled_linear",
    share=share_rows,
    cut=cut_numbers,
    exempt=HEAD,  # few bytes of all, in every token's way
)
FP8_BLOCK = QuantScheme(
    name="fp8_block",
    kept="in float8 (e4m3), a scale for 128 columns",
    devices=frozenset({"cpu", "cuda"}),
    tensors=by_blocks,
    store=store_blocks,
    restore=restore,
    multiply=multiply,
    op="scaled_linear",
    share=share_blocks,
    cut=cut_blocks,
    exempt=HEAD,
)
register_scheme(FP8)
register_scheme(FP8_BLOCK)


@cache
def bounded(bound: float) -> QuantScheme:
    """The scheme fp8 for activations that count as +-bound where they are beyond it."""
    return QuantScheme(
        name="fp8",
        kept=f"in float8 (e4m3), a scale a row, activations within {bound:g}",
        devices=FP8.devices,
        tensors=by_rows,
        store=store_rows,
        restore=restore,
        multiply=partial(multiply, bound=bound),
        op="scaled_linear",
        share=lambda columns, count: bounded(bound),
        cut=cut_numbers,
        exempt=HEAD,
    )
