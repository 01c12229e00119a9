"""Projections in four or eight bits a weight: whole numbers, by the scale of their group of columns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ... import custom_ops
from ...common.errors import LoadError, UnsupportedError
from ...custom_ops._shared.fp8 import divided
from ...custom_ops.linear_w4a16.layout import (
    OFFSET,
    columns_of,
    is_kept_shuffled,
    numbers_of,
    pack,
    shuffle_in_place,
    unshuffle,
    unshuffle_groups,
)
from .scheme import HEAD, Parts, QuantScheme, Shape, register_scheme

# Columns with one scale where nobody says: the first that divides all there are. Of eight bits GGUF's.
GROUPS = {4: (128, 64, 32), 8: (32,)}
# Steps to the largest weight of a group. Of four bits half a step is then the largest error on either side;
# of eight -128 is left out.
STEPS = {4: 7.5, 8: 127.0}
LEAST, MOST = {4: -8, 8: -127}, {4: 7, 8: 127}  # numbers that weights are rounded to
SMALLEST_PART = 16  # columns of a group, where ranks have parts of larger ones


class Named(NamedTuple):
    """The parts by name."""

    packed: Tensor  # int8 [n, in] of eight bits, uint8 [n, in / 2] of four: the even column in the low ones
    scale: Tensor  # [n, groups]
    zero: Tensor | None  # [n, groups]: what the number 0 stands for, of four bits 8
    order: Tensor | None  # int32 [in]: which column of x each column of the weight is for


@dataclass(frozen=True, slots=True)
class Layout:
    """Which parts there are: w = number * scale + zero, of four bits those that are stored less 8."""

    group: int | None = None  # columns; -1: all; None: the first of GROUPS that divides them
    zero: bool = False
    order: bool = False
    bits: int = 4

    @property
    def name(self) -> str:
        """As the setting calls the scheme."""
        return f"w{self.bits}a16"

    def tensors(self, shape: Shape, dtype: torch.dtype) -> Mapping[str, tuple[Shape, torch.dtype]]:
        """The parts. UnsupportedError for columns that are no whole groups of an even number."""
        rows, columns = shape
        group = self._group_of(columns)
        if group is None or columns % group or group % 2:
            wanted = ", ".join(map(str, GROUPS[self.bits] if self.group is None else [self.group]))
            said = f"quantization is {self.name!r}, which cannot keep {shape}"
            raise UnsupportedError(f"{said}; wanted columns by groups of {wanted}")
        numbers = ((rows, columns // 2), torch.uint8) if self.bits == 4 else (shape, torch.int8)
        parts: dict[str, tuple[Shape, torch.dtype]] = {"": numbers}
        parts["scale"] = ((rows, columns // group), dtype)
        if self.zero:
            parts["zero"] = parts["scale"]
        if self.order:
            parts["order"] = ((columns,), torch.int32)
        return parts

    def _group_of(self, columns: int) -> int | None:
        if self.group is None:
            return next((group for group in GROUPS[self.bits] if columns % group == 0), None)
        return columns if self.group == -1 else self.group

    def share(self, columns: int, count: int) -> QuantScheme:
        """The scheme whose groups divide a rank's columns: each has the scale of the one it is a part of.

        UnsupportedError for an order of columns, and for groups that would be too small.
        """
        whole = self._group_of(columns)
        said = f"quantization is {self.name!r}, and ranks are to have {count} of {columns} columns each"
        if self.order:
            raise UnsupportedError(
                f"{said}, which are in an order of their own (g_idx); wanted tensor_parallel 1"
            )
        group = math.gcd(whole or columns, count)
        if group < SMALLEST_PART and group != whole:
            raise UnsupportedError(f"{said}, by groups of {whole}; wanted groups that these cut evenly")
        return by_groups(Layout(group, self.zero, bits=self.bits))

    def cut(self, parts: Parts, columns: int, first: int, count: int) -> Parts:
        """Columns of the numbers, and for each group of them scale and zero of the one it is a part of."""
        packed, scale, zero, _ = self.named(parts)
        whole = columns // scale.shape[1]
        group = math.gcd(whole, count)
        groups = torch.arange(first, first + count, group, device=scale.device) // whole
        zeros = [] if zero is None else [zero.index_select(1, groups)]
        own = packed.narrow(1, first * self.bits // 8, count * self.bits // 8)
        return [own, scale.index_select(1, groups), *zeros]

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
        scale.copy_(divided(groups.abs().amax(dim=2), STEPS[self.bits]))
        if not bool(scale.isfinite().all()):
            raise LoadError(f"holds weights that are not finite, or too large for scales in {scale.dtype}")
        step = scale.to(torch.float32)[:, :, None]
        numbers = (groups / torch.where(step > 0, step, 1.0)).round_().flatten(1)
        numbers = numbers.clamp_(LEAST[self.bits], MOST[self.bits])
        packed.copy_(pack((numbers + OFFSET).to(torch.uint8)) if self.bits == 4 else numbers)
        if zero is not None:
            zero.zero_()
        if order is not None:
            order.copy_(torch.arange(rows.shape[1]))

    def restore(self, parts: Parts) -> Tensor:
        """number * scale + zero, each column where it is in x."""
        packed, scale, zero, order = self.named(parts)
        numbers = numbers_of(packed).to(torch.float32)
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
    return columns_of(packed) // scale.shape[1]


def _is_shuffled(packed: Tensor, scale: Tensor) -> bool:
    group = _columns_a_group(packed, scale)
    return is_kept_shuffled(packed.shape[0], columns_of(packed), group, scale.dtype, packed.device.type)


@cache
def by_groups(layout: Layout) -> QuantScheme:
    """The scheme for a layout."""
    size = {None: {4: "128, 64 or 32", 8: 32}[layout.bits], -1: "all"}.get(layout.group, layout.group)
    scales, sorting = (
        "a scale and a zero" if layout.zero else "a scale",
        " in an order of their own" * layout.order,
    )
    said, tensors = f"bits a weight, {scales} for {size} columns{sorting}", layout.tensors
    cpus, every = frozenset({"cpu"}), frozenset({"cpu", "cuda"})
    if layout.bits == 4:
        scheme = QuantScheme(
            name="w4a16", kept=f"in four {said}", devices=every, tensors=tensors, batch_invariant=cpus
        )
    else:
        scheme = QuantScheme(name="w8a16", kept=f"in eight {said}", devices=every, tensors=tensors)
    return replace(
        scheme,
        store=layout.store,
        restore=layout.restore,
        multiply=layout.multiply,
        op="linear_w4a16",
        settle=layout.settle,
        filled=layout.filled,
        share=layout.share,
        cut=layout.cut,
        shared=frozenset({"order"}),
        exempt=HEAD,
    )


def w4a16(group: int | None = None, *, zero: bool = False, order: bool = False) -> QuantScheme:
    """The scheme for groups of so many columns; -1: all; None: the largest of 128, 64 and 32 that divides."""
    return by_groups(Layout(group, zero, order))


def w8a16(group: int | None = None, *, zero: bool = False, order: bool = False) -> QuantScheme:
    """The same in eight bits; None: 32."""
    return by_groups(Layout(group, zero, order, bits=8))


register_scheme(w4a16())
register_scheme(w8a16())
