"""GGUF's blocks of weights: what each kind holds and stands for, and how rows lie where a kernel reads them.

Interleaved, sixteen rows are a group in one piece, block after block. Of a block each region, its scales or
its numbers, has its first unit of all sixteen rows, then the second of all: a vector then holds as many rows
as it has lanes. What is left beyond a multiple of sixteen lies by rows. Each byte of a file is there once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 16  # rows that are interleaved
SPAN = 32  # columns of x that share a scale
AT_ONCE = 1 << 24  # bytes


class Numbers(NamedTuple):
    """Weights [n, k] as w = value * scale + minimum, by the columns that share a scale."""

    values: Tensor  # int8 [n, k]
    scale: Tensor  # float32 [n, k / 32], or / 16
    minimum: Tensor | None  # float32 [n, k / 32]

    def dense(self) -> Tensor:
        """The weights in float32: a product and a sum, each rounded."""
        rows = torch.unflatten(self.values, 1, (self.scale.shape[1], -1)) * self.scale[:, :, None]
        return (rows if self.minimum is None else rows + self.minimum[:, :, None]).flatten(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of blocks: its place among csrc/linear_blocks/cpu.cpp's, and how a block lies in a file."""

    code: int
    columns: int
    regions: tuple[tuple[int, int], ...]  # bytes, and bytes of a unit
    unpack: Callable[[Tensor], Numbers]  # of rows of blocks [n, k / columns, bytes]

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return sum(size for size, _ in self.regions)

    def row_bytes(self, columns: int) -> int:
        """Of so many columns, whole blocks."""
        return columns // self.columns * self.num_bytes

    def num_columns(self, row_bytes: int) -> int:
        """Of so many bytes, whole blocks."""
        return row_bytes // self.num_bytes * self.columns

    def set_heads(self, weight: Tensor, value: float) -> None:
        """Have every scale and minimum in float16 of a weight, as `interleave` has it, be that value."""
        head = torch.tensor([value], dtype=torch.float16, device=weight.device).view(torch.uint8)
        whole, at = weight.shape[0] // GROUP * GROUP, 0
        groups = weight[:whole].view(-1, weight.shape[1] // self.num_bytes, GROUP * self.num_bytes)
        left = torch.unflatten(weight[whole:], 1, (-1, self.num_bytes))
        for size, unit in self.regions:
            if unit == head.numel():
                groups[:, :, GROUP * at : GROUP * (at + size)] = head.repeat(GROUP * size // unit)
                left[:, :, at : at + size] = head.repeat(size // unit)
            at += size

    def numbers(self, rows: Tensor) -> Numbers:
        """What rows [n, bytes] stand for, each where it lies."""
        return self.unpack(torch.unflatten(rows, 1, (-1, self.num_bytes)))


def interleave(weight: Tensor, kind: str) -> Tensor:
    """Rows [n, bytes] in groups of sixteen; those that are left as they are."""
    return _in_groups(weight, kind, _interleaved)


def by_rows(weight: Tensor, kind: str) -> Tensor:
    """What `interleave` was given."""
    return _in_groups(weight, kind, _apart)


def interleave_in_place(weight: Tensor, kind: str) -> None:
    """The same, some rows at a time: memory for a few megabytes is enough."""
    step = max(GROUP, AT_ONCE // weight.shape[1] // GROUP * GROUP)
    for start in range(0, weight.shape[0], step):
        rows = weight[start : start + step]
        rows.copy_(interleave(rows, kind))


def _in_groups(weight: Tensor, kind: str, change: Callable[[Tensor, Kind], Tensor]) -> Tensor:
    whole = weight.shape[0] // GROUP * GROUP
    groups = change(weight[:whole].view(whole // GROUP, GROUP * weight.shape[1]), KINDS[kind])
    return torch.cat((groups.view(whole, weight.shape[1]), weight[whole:]))


def _interleaved(groups: Tensor, kind: Kind) -> Tensor:
    blocks = groups.view(groups.shape[0], GROUP, groups.shape[1] // GROUP // kind.num_bytes, kind.num_bytes)
    parts = torch.split(blocks, [size for size, _ in kind.regions], dim=3)
    units = [
        torch.unflatten(part, 3, (-1, unit)).permute(0, 2, 3, 1, 4).flatten(2)
        for part, (_, unit) in zip(parts, kind.regions, strict=True)
    ]
    return torch.cat(units, dim=2)


def _apart(groups: Tensor, kind: Kind) -> Tensor:
    size = GROUP * kind.num_bytes
    blocks = groups.view(groups.shape[0], groups.shape[1] // size, size)
    parts = torch.split(blocks, [GROUP * size for size, _ in kind.regions], dim=2)
    rows = [
        torch.unflatten(part, 2, (-1, GROUP, unit)).permute(0, 3, 1, 2, 4).flatten(3)
        for part, (_, unit) in zip(parts, kind.regions, strict=True)
    ]
    return torch.cat(rows, dim=3)


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """float32 [n, blocks, count] of the float16 that begin at a byte."""
    lying = blocks[:, :, start : start + 2 * count].contiguous()
    return lying.view(torch.float16).to(torch.float32)


def _nibbles(lying: Tensor) -> Tensor:
    """[..., 2 m] of bytes [..., m]: the lower four bits of all, then the upper ones."""
    return torch.cat((lying & 15, lying >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> Numbers:
    values = _nibbles(blocks[:, :, 2:]).to(torch.int8) - 8
    return Numbers(values.flatten(1), _halves(blocks, 0).flatten(1), None)


def _q4_1(blocks: Tensor) -> Numbers:
    values = _nibbles(blocks[:, :, 4:]).to(torch.int8)
    scale, minimum = _halves(blocks, 0, 2).unbind(dim=2)
    return Numbers(values.flatten(1), scale, minimum)


def _q8_0(blocks: Tensor) -> Numbers:
    values = blocks[:, :, 2:].contiguous().view(torch.int8)
    return Numbers(values.flatten(1), _halves(blocks, 0).flatten(1), None)


def _q4_k(blocks: Tensor) -> Numbers:
    scale, minimum = _halves(blocks, 0, 2).unbind(dim=2)
    first, second, third = torch.split(blocks[:, :, 4:16], 4, dim=2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=2)
    minimums = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=2)
    values = _nibbles(torch.unflatten(blocks[:, :, 16:], 2, (4, 32))).to(torch.int8)
    return Numbers(
        values.flatten(1),
        (scale[:, :, None] * scales).flatten(1),
        (-minimum[:, :, None] * minimums).flatten(1),
    )


def _q6_k(blocks: Tensor) -> Numbers:
    low = _nibbles(torch.unflatten(blocks[:, :, :128], 2, (2, 64)))
    high = torch.unflatten(blocks[:, :, 128:192], 2, (2, 32))
    top = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=3)
    values = (low | top << 4).to(torch.int8) - 32
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8)
    return Numbers(values.flatten(1), (_halves(blocks, 208) * scales).flatten(1), None)


KINDS = {
    "Q4_0": Kind(code=0, columns=32, regions=((2, 2), (16, 4)), unpack=_q4_0),
    "Q4_1": Kind(code=1, columns=32, regions=((2, 2), (2, 2), (16, 4)), unpack=_q4_1),
    "Q8_0": Kind(code=2, columns=32, regions=((2, 2), (32, 4)), unpack=_q8_0),
    "Q4_K": Kind(code=3, columns=256, regions=((2, 2), (2, 2), (12, 1), (128, 4)), unpack=_q4_k),
    "Q6_K": Kind(code=4, columns=256, regions=((128, 4), (64, 4), (16, 1), (2, 2)), unpack=_q6_k),
}
