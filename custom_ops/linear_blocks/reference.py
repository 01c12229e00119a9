"""The formula of lamina::linear_blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._shared.fp8 import divided
from ..silu_and_mul import reference as gate
from .layout import KINDS, SPAN, Numbers, by_rows
from .runs import split

LARGEST = 127.0
TINY = 2.0**-120  # LARGEST by less would be infinite
FEW_ROWS = 1 << 12  # of weights, whose sums by spans are held at once


class Spans(NamedTuple):
    """Rows of x as value * scale, by spans of 32 columns."""

    values: Tensor  # float32 [T, k], whole numbers
    scale: Tensor  # float32 [T, k / 32]


def linear_blocks(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, silu_and_mul: bool = False
) -> Tensor:
    """Whole numbers multiplied and summed exactly by spans; what those come to by both scales, in float32."""
    spans = quantize(x.to(torch.float32))
    wide = [
        _multiply(spans, KINDS[own].numbers(part))
        for own, rows in split(weight, kind)
        for part in torch.split(by_rows(rows, own), FEW_ROWS)
    ]
    out = torch.cat(wide, dim=1) if wide else x.new_empty((x.shape[0], 0), dtype=torch.float32)
    out = (out if bias is None else out + bias.to(torch.float32)).to(x.dtype)
    return gate.silu_and_mul(out) if silu_and_mul else out


def quantize(x: Tensor) -> Spans:
    """Each span by a scale that its largest column gives; the scale is no number where a column is none."""
    spans = torch.unflatten(x, 1, (x.shape[1] // SPAN, SPAN))
    peak = spans.abs().amax(dim=2)
    inverse = torch.where(peak >= TINY, torch.full_like(peak, LARGEST) / peak, 0.0)
    values = (spans * inverse[:, :, None]).round().nan_to_num_(0.0, 0.0, 0.0)
    scale = torch.where(spans.isfinite().all(dim=2), divided(peak, LARGEST), torch.nan)
    return Spans(values.flatten(1), scale)


def _multiply(spans: Spans, weight: Numbers) -> Tensor:
    """[T, n] float32."""
    halves = weight.scale.shape[1]  # columns with one scale: a span, or half of one
    x, w = (
        torch.unflatten(part.to(torch.float32), 1, (halves, -1)) for part in (spans.values, weight.values)
    )
    scale = spans.scale.repeat_interleave(halves // spans.scale.shape[1], dim=1)
    sums = torch.einsum("tsk,nsk->tns", x, w) * (scale[:, None] * weight.scale)
    if weight.minimum is not None:
        sums += weight.minimum * (scale * x.sum(dim=2))[:, None]
    return sums.sum(dim=2)
