"""Projections in GGUF's blocks of 32 or 256 columns, multiplied as they lie in a file: for CPUs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ... import custom_ops
from ...common.errors import LoadError, UnsupportedError
from ...custom_ops.linear_blocks.layout import KINDS, SPAN, by_rows, interleave_in_place
from ...custom_ops.linear_blocks.runs import Run, columns_of, name_of, num_bytes, runs_of, split
from .scheme import (
    KeptRows,
    Parts,
    QuantScheme,
    Shape,
    find_scheme,
    largest_of,
    register_scheme,
)

HALF = torch.float16  # of scales and minimums
SHRUNK = (1.0, 0.95, 0.9, 0.85)  # of a span's range: outliers that are cut may cost less than wider steps
WHAT = {
    "Q4_0": "four bits a weight, a scale for 32 columns",
    "Q4_1": "four bits a weight, a scale and a minimum for 32 columns",
    "Q8_0": "one byte a weight, a scale for 32 columns",
    "Q4_K": "four bits a weight, a scale and a minimum for 32 columns",
    "Q6_K": "six bits a weight, a scale for 16 columns",
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A kind of blocks: the one part is rows of them, uint8 [out, bytes of a row]."""

    kind: str
    is_own: bool = False  # made of other weights by a setting, not a file's

    def keeping(self, scheme: QuantScheme) -> QuantScheme:
        """That scheme, of projections in these blocks."""
        return replace(
            scheme,
            tensors=self.tensors,
            store=STORES[self.kind],
            restore=self.restore,
            multiply=self.multiply,
            op="linear_blocks",
            share=self.share,
            cut=self.cut,
            settle=self.settle,
            filled=self.filled,
        )

    def tensors(self, shape: Shape, dtype: torch.dtype) -> Mapping[str, tuple[Shape, torch.dtype]]:
        """The rows. UnsupportedError for columns that are no whole blocks."""
        columns = KINDS[self.kind].columns
        if shape[1] % columns:
            raise UnsupportedError(
                f"quantization in blocks of {self.kind} cannot keep {shape}; wanted columns by {columns}"
            )
        return {"": ((shape[0], KINDS[self.kind].row_bytes(shape[1])), torch.uint8)}

    def restore(self, parts: Parts) -> Tensor:
        """Each number by its scale, and its minimum added."""
        return KINDS[self.kind].numbers(parts[0]).dense()

    def multiply(self, x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
        """lamina::linear_blocks."""
        return custom_ops.linear_blocks(x, parts[0], bias, self.kind)

    def share(self, columns: int, count: int) -> QuantScheme:
        """The same scheme. UnsupportedError for what cuts a block in two."""
        if count % KINDS[self.kind].columns:
            raise UnsupportedError(
                f"quantization in blocks of {self.kind} keeps rows of {columns} columns by "
                f"{KINDS[self.kind].columns}, and ranks are to have {count} each; wanted whole blocks"
            )
        return find_scheme(OWN[self.kind]) if self.is_own else in_blocks(self.kind)

    def cut(self, parts: Parts, columns: int, first: int, count: int) -> Parts:
        """The blocks of some columns."""
        kind = KINDS[self.kind]
        return [parts[0].narrow(1, kind.row_bytes(first), kind.row_bytes(count))]

    def settle(self, parts: Parts) -> None:
        """Sixteen rows as one."""
        interleave_in_place(parts[0], self.kind)

    def filled(self, parts: Parts) -> Parts:
        """Row by row again."""
        return [by_rows(parts[0], self.kind)]


@dataclass(frozen=True, slots=True)
class MixedBlocks:
    """Rows in several kinds of blocks: the one part is each run behind the one before, uint8 [bytes]."""

    kind: str  # as lamina::linear_blocks has it: "Q4_K:5120+Q6_K:1024"
    runs: tuple[Run, ...]  # that it says

    def keeping(self, scheme: QuantScheme) -> QuantScheme:
        """That scheme, of projections in these blocks."""
        return replace(
            scheme,
            tensors=self.tensors,
            store=self.store,
            restore=self.restore,
            multiply=self.multiply,
            share=None,
            cut=None,
            settle=self.settle,
            filled=self.filled,
            narrow=self.narrow,
        )

    def tensors(self, shape: Shape, dtype: torch.dtype) -> Mapping[str, tuple[Shape, torch.dtype]]:
        """All bytes. UnsupportedError for columns that are no whole blocks, or another number of rows."""
        rows, columns = sum([run.num_rows for run in self.runs]), columns_of(self.runs)
        if shape[0] != rows or shape[1] % columns:
            raise UnsupportedError(
                f"quantization in blocks of {self.kind} cannot keep {shape}; wanted {rows} rows and columns "
                f"by {columns}"
            )
        return {"": ((num_bytes(self.runs, shape[1]),), torch.uint8)}

    def store(self, rows: Tensor, parts: Parts) -> None:
        """Each row in the blocks of its kind."""
        own = torch.split(rows, [run.num_rows for run in self.runs])
        for (kind, blocks), some in zip(split(parts[0], self.kind), own, strict=True):
            STORES[kind](some, [blocks])

    def restore(self, parts: Parts) -> Tensor:
        """Each number by its scale, and its minimum added."""
        return torch.cat([KINDS[kind].numbers(rows).dense() for kind, rows in split(parts[0], self.kind)])

    def multiply(self, x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
        """lamina::linear_blocks, once for all kinds."""
        return custom_ops.linear_blocks(x, parts[0], bias, self.kind)

    def settle(self, parts: Parts) -> None:
        """Sixteen rows of a kind as one."""
        for kind, rows in split(parts[0], self.kind):
            interleave_in_place(rows, kind)

    def filled(self, parts: Parts) -> Parts:
        """Row by row again."""
        return [torch.cat([by_rows(rows, kind).flatten() for kind, rows in split(parts[0], self.kind)])]

    def narrow(self, parts: Parts, start: int, count: int) -> Parts:
        """The bytes of some rows, by rows where those are of one kind."""
        found, first = [], 0
        for _, rows in split(parts[0], self.kind):
            own = rows[max(0, start - first) : max(0, start + count - first)]
            found += [own] if own.shape[0] else []
            first += rows.shape[0]
        if len(found) == 1:
            return found
        begin = found[0].storage_offset() - parts[0].storage_offset()
        return [parts[0].narrow(0, begin, sum(own.numel() for own in found))]


def store_four_bits(rows: Tensor, parts: Parts) -> None:
    """Each 32 columns in steps from a minimum, whichever of a few ranges costs the least squares.

    LoadError for weights that are not finite, or beyond float16.
    """
    spans = _spans_of(rows)
    low, high = spans.amin(dim=2, keepdim=True), spans.amax(dim=2, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2
    least = torch.full_like(low, torch.inf)
    kept = [torch.zeros_like(low), torch.zeros_like(low), torch.zeros_like(spans)]
    for share in SHRUNK:
        numbers = _whole(spans, middle - share * reach, 2 * share * reach / 15)
        scale, minimum = (_as_half(one) for one in _fitted(spans, numbers))
        numbers = _whole(spans, minimum, scale)
        cost = (numbers * scale + minimum - spans).square().sum(dim=2, keepdim=True)
        is_better = cost < least
        least = torch.where(is_better, cost, least)
        kept = [
            torch.where(is_better, new, old) for new, old in zip((scale, minimum, numbers), kept, strict=True)
        ]
    _write(parts[0], torch.cat(kept[:2], dim=2), _paired(kept[2].to(torch.uint8), SPAN // 2))


def store_bytes(rows: Tensor, parts: Parts) -> None:
    """Each 32 columns by the scale that the largest gives, as float16 has it. LoadError as for four bits."""
    spans = _spans_of(rows)
    scale = _as_half(spans.abs().amax(dim=2, keepdim=True) / 127)
    numbers = _divided(spans, scale).round_().clamp_(-127, 127)
    _write(parts[0], scale, numbers.to(torch.int8).view(torch.uint8))


def _spans_of(rows: Tensor) -> Tensor:
    largest = float(largest_of(rows).max()) if rows.numel() else 0.0
    if largest > torch.finfo(HALF).max / 2:
        raise LoadError(f"holds weights up to {largest:g}, which scales in {HALF} do not reach")
    return torch.unflatten(rows, 1, (-1, SPAN))


def _whole(spans: Tensor, minimum: Tensor, scale: Tensor) -> Tensor:
    """The number from 0 to 15 that is nearest to each weight."""
    return _divided(spans - minimum, scale).round_().clamp_(0, 15)


def _fitted(spans: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the minimum with the least squares for these numbers; of equal ones 0 and their mean."""
    mean, center = numbers.mean(dim=2, keepdim=True), spans.mean(dim=2, keepdim=True)
    off = numbers - mean
    spread = off.square().sum(dim=2, keepdim=True)
    slope = (off * (spans - center)).sum(dim=2, keepdim=True)
    scale = _divided(slope, spread)
    return scale, center - scale * mean


def _as_half(values: Tensor) -> Tensor:
    return values.to(HALF).to(torch.float32)


def _write(rows: Tensor, heads: Tensor, numbers: Tensor) -> None:
    """Blocks of float16 heads and bytes [n, blocks, m]."""
    lying = heads.to(HALF).contiguous().view(torch.uint8)
    rows.copy_(torch.cat((lying, numbers), dim=2).flatten(1))


def store_signed_bits(rows: Tensor, parts: Parts) -> None:
    """Each 32 columns by the scale that the largest gives, on whose side of zero are eight steps."""
    spans = _spans_of(rows)
    largest = spans.gather(2, spans.abs().argmax(dim=2, keepdim=True))
    scale = _as_half(largest / -8)
    numbers = (_divided(spans, scale).round_() + 8).clamp_(0, 15).to(torch.uint8)
    _write(parts[0], scale, _paired(numbers, SPAN // 2))


def store_k_bits(rows: Tensor, parts: Parts) -> None:
    """Each 32 columns in 15 steps from a minimum, at most 0; both in 63 steps of a block's largest."""
    spans = torch.unflatten(_spans_of(rows), 1, (-1, 8))  # [n, blocks, 8, 32]
    low = spans.amin(dim=3).clamp_(max=0.0)
    reach = (spans.amax(dim=3) - low).clamp_(min=0.0)
    scale, minimum = (_as_half(one.amax(dim=2) / 63) for one in (reach / 15, -low))
    scales, minimums = (
        _divided(one, step[:, :, None]).round_().clamp_(0, 63)
        for one, step in ((reach / 15, scale), (-low, minimum))
    )
    steps, ends = (one * head[:, :, None] for one, head in ((scales, scale), (minimums, minimum)))
    numbers = _divided(spans + ends[..., None], steps[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    s, m = scales.to(torch.uint8), minimums.to(torch.uint8)
    first, last = slice(0, 4), slice(4, 8)
    packed = (
        s[:, :, first] | s[:, :, last] >> 4 << 6,
        m[:, :, first] | m[:, :, last] >> 4 << 6,
        s[:, :, last] & 15 | (m[:, :, last] & 15) << 4,
    )
    nibbles = _paired(torch.unflatten(numbers, 2, (4, 2)).flatten(3), SPAN).flatten(2)
    _write(parts[0], torch.stack((scale, minimum), dim=2), torch.cat((*packed, nibbles), dim=2))


def store_six_bits(rows: Tensor, parts: Parts) -> None:
    """Each 16 columns from -32 to 31 of a scale; the scales in whole steps of the largest of a block."""
    spans = torch.unflatten(_spans_of(rows).flatten(1), 1, (-1, 16, 16))  # [n, blocks, 16, 16]
    reach = spans.abs().amax(dim=3) / 31
    scale = _as_half(reach.amax(dim=2, keepdim=True) / 127)
    scales = _divided(reach, scale).round_().clamp_(0, 127)
    steps = (scales * scale)[..., None]
    numbers = (_divided(spans, steps).round_().clamp_(-32, 31) + 32).to(torch.uint8)
    numbers = torch.unflatten(numbers.flatten(2), 2, (2, 4, 32))  # [n, blocks, halves, quarters, 32]
    low = _paired((numbers & 15).flatten(3), 64).flatten(2)
    top = sum((numbers[:, :, :, quarter] >> 4) << 2 * quarter for quarter in range(4))
    assert isinstance(top, Tensor)
    lying = (low, top.flatten(2), scales.to(torch.uint8), scale.to(HALF).view(torch.uint8))
    parts[0].copy_(torch.cat(lying, dim=2).flatten(1))


def _divided(values: Tensor, scale: Tensor) -> Tensor:
    """By the scale, 0 where that is 0."""
    return torch.where(scale != 0, values / torch.where(scale != 0, scale, 1.0), 0.0)


def _paired(numbers: Tensor, distance: int) -> Tensor:
    """Bytes of two numbers so many apart: the first of each pair of runs in the lower four bits."""
    runs = torch.unflatten(numbers, -1, (-1, 2, distance))
    return (runs[..., 0, :] | runs[..., 1, :] << 4).flatten(-2)


Store = Callable[[Tensor, Parts], None]
STORES: Mapping[str, Store] = {
    "Q4_0": store_signed_bits,
    "Q4_1": store_four_bits,
    "Q8_0": store_bytes,
    "Q4_K": store_k_bits,
    "Q6_K": store_six_bits,
}
OWN = {"Q8_0": "q8", "Q4_1": "q4"}  # settings
EIGHT, FOUR = Blocks("Q8_0", is_own=True), Blocks("Q4_1", is_own=True)
Q8 = EIGHT.keeping(
    QuantScheme(
        name="q8",
        kept="in blocks of Q8_0: one byte a weight, a scale for 32 columns",
        devices=frozenset({"cpu"}),
        tensors=EIGHT.tensors,
        batch_invariant=frozenset({"cpu"}),
    )
)
Q4 = FOUR.keeping(
    QuantScheme(
        name="q4",
        kept="in blocks of Q4_1: four bits a weight, a scale and a minimum for 32 columns",
        devices=Q8.devices,
        tensors=FOUR.tensors,
        batch_invariant=Q8.batch_invariant,
        head=Q8,
    )
)
register_scheme(Q8)
register_scheme(Q4)


@cache
def in_blocks(kind: str) -> QuantScheme:
    """The scheme for weights that a file has in blocks of that kind."""
    kept = f"in the file's blocks of {kind}: {WHAT[kind]}"
    return Blocks(kind).keeping(replace(Q8, name=kind.lower(), kept=kept, stack=in_mixed_blocks))


@cache  # so that projections of the same rows have one scheme
def in_mixed_blocks(runs: tuple[KeptRows, ...]) -> QuantScheme:
    """The scheme for rows of several kinds of blocks. UnsupportedError for rows that are kept otherwise."""
    kinds = {in_blocks(kind): kind for kind in KINDS}
    for run in runs:
        if run.scheme not in kinds:
            raise UnsupportedError(
                f"{run.num_rows} rows are kept {run.scheme.kept}; wanted all in blocks of a file"
            )
    kind = name_of(Run(kinds[run.scheme], run.num_rows) for run in runs)
    names = list(dict.fromkeys(kinds[run.scheme] for run in runs))
    rows = ", ".join(f"{run.num_rows} rows of {run.kind}" for run in runs_of(kind))
    what = "; ".join(f"{name} has {WHAT[name]}" for name in names)
    kept = f"in the file's blocks, {rows}: {what}"
    scheme = replace(in_blocks(names[0]), name="+".join(names).lower(), kept=kept, runs=runs)
    return MixedBlocks(kind, runs_of(kind)).keeping(scheme)
