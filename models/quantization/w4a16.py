"""Projections in four bits a weight: numbers from 0 to 15 less 8, by the scale of their group of columns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ... import custom_ops
from ...common.errors import LoadError, UnsupportedError
from ...custom_ops._shared.fp8 import divided
from ...custom_ops.linear_w4a16.layout import (
    is_kept_shuffled,
    pack,
    shuffle_in_place,
    unpack,
    unshuffle,
    unshuffle_groups,
)
from .scheme import HEAD, Parts, QuantScheme, Shape, register_scheme

GROUPS = (128, 64, 32)  # columns with one scale where nobody says: the first that divides all there are
STEPS = 7.5  # of the largest weight of a group: half a step is then the largest error on either side
SMALLEST_PART = 16  # columns of a group, where ranks have parts of larger ones
OFFSET = 8  # what is stored of zero


class Named(NamedTuple):
    """The parts by name."""

    packed: Tensor  # uint8 [n, in / 2], the even column in the low four bits
    scale: Tensor  # [n, groups]
    zero: Tensor | None  # [n, groups]: what the number 8 stands for
    order: Tensor | None  # int32 [in]: which column of x each column of the weight is for


@dataclass(frozen=True, slots=True)
class Layout:
    """Which parts there are: w = (number - 8) * scale + zero."""

    group: int | None = None  # columns; -1: all; None: the largest of GROUPS that divides them
    zero: bool = False
    order: bool = False

    def tensors(self, shape: Shape, dtype: torch.dtype) -> Mapping[str, tuple[Shape, torch.dtype]]:
        """The parts. UnsupportedError for columns that are no whole groups of an even number."""
        rows, columns = shape
        group = self._group_of(columns)
        if group is None or columns % group or group % 2:
            wanted = ", ".join(map(str, GROUPS)) if self.group is None else str(self.group)
            raise UnsupportedError(
                f"quantization is 'w4a16', which cannot keep {shape}; wanted columns by groups of {wanted}"
            )
        parts: dict[str, tuple[Shape, torch.dtype]] = {"": ((rows, columns // 2), torch.uint8)}
        parts["scale"] = ((rows, columns // group), dtype)
        if self.zero:
            parts["zero"] = parts["scale"]
        if self.order:
            parts["order"] = ((columns,), torch.int32)
        return parts

    def _group_of(self, columns: int) -> int | None:
        if self.group is None:
            return next((group for group in GROUPS if columns % group == 0), None)
        return columns if self.group == -1 else self.group

    def share(self, columns: int, count: int) -> QuantScheme:
        """The scheme whose groups divide a rank's columns: each has the scale of the one it is a part of.

        UnsupportedError for an order of columns, and for groups that would be too small.
        """
        whole = self._group_of(columns)
        said = f"quantization is 'w4a16', and ranks are to have {count} of {columns} columns each"
        if self.order:
            raise UnsupportedError(
                f"{said}, which are in an order of their own (g_idx); wanted tensor_parallel 1"
            )
        group = math.gcd(whole or columns, count)
        if group < SMALLEST_PART and group != whole:
            raise UnsupportedError(f"{said}, by groups of {whole}; wanted groups that these cut evenly")
        return w4a16(group, zero=self.zero)

    def cut(self, parts: Parts, columns: int, first: int, count: int) -> Parts:
        """Columns of the numbers, and for each group of them scale and zero of the one it is a part of."""
        packed, scale, zero, _ = self.named(parts)
        whole = columns // scale.shape[1]
        group = math.gcd(whole, count)
        groups = torch.arange(first, first + count, group, device=scale.device) // whole
        zeros = [] if zero is None else [zero.index_select(1, groups)]
        return [packed.narrow(1, first // 2, count // 2), scale.index_select(1, groups), *zeros]

    def named(self, parts: Parts) -> Named:
        """The parts by name."""
        packed, scale, *rest = parts
        order = rest.pop() if self.order else None
        return Named(packed, scale, rest.pop() if self.zero else None, order)

    def store(self, rows: Tensor, parts: Parts) -> None:
        """Each group by the scale that its largest weight gives, as the part rounds it, and zeros of zero.

        LoadError where that is not finite, or beyond the dtype of scales.
        """
        packed, scale, zero, order = self.named(parts)
        groups = torch.unflatten(rows, 1, (scale.shape[1], -1))
        scale.copy_(divided(groups.abs().amax(dim=2), STEPS))
        if not bool(scale.isfinite().all()):
            raise LoadError(f"holds weights that are not finite, or too large for scales in {scale.dtype}")
        step = scale.to(torch.float32)[:, :, None]
        numbers = (groups / torch.where(step > 0, step, 1.0)).round_().clamp_(-OFFSET, OFFSET - 1) + OFFSET
        packed.copy_(pack(numbers.flatten(1).to(torch.uint8)))
        if zero is not None:
            zero.zero_()
        if order is not None:
            order.copy_(torch.arange(rows.shape[1]))

    def restore(self, parts: Parts) -> Tensor:
        """(number - 8) * scale + zero, each column where it is in x."""
        packed, scale, zero, order = self.named(parts)
        numbers = unpack(packed).to(torch.float32).sub_(OFFSET)
        groups = torch.unflatten(numbers, 1, (scale.shape[1], -1)) * scale.to(torch.float32)[:, :, None]
        if zero is not None:
            groups += zero.to(torch.float32)[:, :, None]
        rows = groups.flatten(1)
        return rows if order is None else torch.empty_like(rows).index_copy_(1, order.long(), rows)

    def settle(self, parts: Parts) -> None:
        """Shuffle numbers and what belongs to their groups where the device's kernel reads them so."""
        packed, scale, zero, _ = self.named(parts)
        if _is_shuffled(packed, scale):
            shuffle_in_place(packed, scale, zero)

    def filled(self, parts: Parts) -> Parts:
        """By rows again."""
        packed, scale, zero, order = self.named(parts)
        if not _is_shuffled(packed, scale):
            return parts
        zeros = [] if zero is None else [unshuffle_groups(zero)]
        return [unshuffle(packed), unshuffle_groups(scale), *zeros, *([] if order is None else [order])]

    def multiply(self, x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
        """lamina::linear_w4a16, of x's columns in order."""
        packed, scale, zero, order = self.named(parts)
        x = x if order is None else x.index_select(1, order)
        group = _columns_a_group(packed, scale)
        return custom_ops.linear_w4a16(x, packed, scale, zero, bias, group, _is_shuffled(packed, scale))


def _columns_a_group(packed: Tensor, scale: Tensor) -> int:
    return 2 * packed.shape[1] // scale.shape[1]


def _is_shuffled(packed: Tensor, scale: Tensor) -> bool:
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    group = _columns_a_group(packed, scale)
    return is_kept_shuffled(rows, columns, group, scale.dtype, packed.device.type)


@cache
def w4a16(group: int | None = None, *, zero: bool = False, order: bool = False) -> QuantScheme:
    """The scheme for groups of so many columns; -1: all; None: the largest of 128, 64 and 32 that divides."""
    layout = Layout(group, zero, order)
    size = {None: "128, 64 or 32", -1: "all"}.get(group, group)
    scales, sorting = "a scale and a zero" if zero else "a scale", " in an order of their own" * order
    return QuantScheme(
        name="w4a16",
        kept=f"in four bits a weight, {scales} for {size} columns{sorting}",
        devices=frozenset({"cpu", "cuda"}),
        tensors=layout.tensors,
        store=layout.store,
        restore=layout.restore,
        multiply=layout.multiply,
        op="linear_w4a16",
        batch_invariant=frozenset({"cpu"}),
        settle=layout.settle,
        filled=layout.filled,
        share=layout.share,
        cut=layout.cut,
        shared=frozenset({"order"}),
        exempt=HEAD,
    )


register_scheme(w4a16())
