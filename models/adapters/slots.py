"""Slots for adapters: tensors at fixed addresses beside a model's weights, and projections that read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ... import custom_ops
from ..layers import Ops
from ..quantization.model_schemes import SEPARATOR, ColumnsOfRank
from ..quantization.scheme import StoredWeight, TensorTable
from ..registry import ParameterSpec
from .adapter import AdaptedProjection, adaptable

TOKEN_SLOTS = f"lora{SEPARATOR}slots"  # the slot of each token of a step, among the weights
PARTS = tuple(f"lora_{name}" for name in AdaptedProjection._fields)


class AdaptedWeight(NamedTuple):
    """A projection with the slots of what adapters add to it; nothing but Ops.linear may meet one."""

    base: Tensor | StoredWeight | ColumnsOfRank
    slots: AdaptedProjection  # each with a first dimension more, of slots
    token_slots: Tensor  # [tokens of the largest step] int32
    rows: tuple[int, ...]  # of each part


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLayout:
    """How many slots there are, of what rank, and which parts each projection has."""

    num_slots: int
    rank: int
    num_tokens: int  # of the largest step
    rows: Mapping[str, tuple[int, ...]]  # by parameter
    columns: Mapping[str, int]

    def table(self, dtype: torch.dtype) -> TensorTable:
        """Shape and dtype of every tensor, by its name among the weights."""
        table: TensorTable = {TOKEN_SLOTS: ((self.num_tokens,), torch.int32)}
        for name, rows in self.rows.items():
            a, b, scales = (f"{name}{SEPARATOR}{part}" for part in PARTS)
            table[a] = (self.num_slots, len(rows) * self.rank, self.columns[name]), dtype
            table[b] = (self.num_slots, sum(rows), self.rank), dtype
            table[scales] = (self.num_slots, len(rows)), torch.float32
        return table

    def num_bytes(self, dtype: torch.dtype) -> int:
        """What all of them take."""
        sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in self.table(dtype).values()]
        return sum(sizes)

    def of(self, name: str, tensors: Mapping[str, Tensor]) -> AdaptedProjection:
        """The slots of one projection."""
        return AdaptedProjection(*[tensors[f"{name}{SEPARATOR}{part}"] for part in PARTS])

    def join(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights as a model's forward takes them, projections with their slots."""
        token_slots = weights[TOKEN_SLOTS]
        joined = {
            name: AdaptedWeight(weights[name], self.of(name, weights), token_slots, rows)
            for name, rows in self.rows.items()
        }
        return {**weights, **cast(Mapping[str, Tensor], joined)}


def slot_layout(
    specs: Mapping[str, ParameterSpec], *, num_slots: int, rank: int, num_tokens: int
) -> SlotLayout:
    """The layout of so many slots for a model with these parameters."""
    projections = adaptable(specs)
    return SlotLayout(
        num_slots=num_slots,
        rank=rank,
        num_tokens=num_tokens,
        rows={name: spec.source_rows for name, spec in projections.items()},
        columns={name: spec.shape[1] for name, spec in projections.items()},
    )


def with_adapters(ops: Ops) -> Ops:
    """The same operations, whose linear adds what the slot of each token says."""

    def adapted(x: Tensor, base: Tensor | StoredWeight, bias: Tensor | None, weight: AdaptedWeight) -> Tensor:
        y = ops.linear(x, cast(Tensor, base), bias)
        return custom_ops.lora(y, x, *weight.slots, weight.token_slots, weight.rows)

    def linear(x: Tensor, weight: Tensor | AdaptedWeight, bias: Tensor | None = None, /) -> Tensor:
        if not isinstance(weight, AdaptedWeight):
            return ops.linear(x, weight, bias)
        if not isinstance(weight.base, ColumnsOfRank):
            return adapted(x, weight.base, bias, weight)
        # Each rank adds what its columns of a come to, and the sum is over both.
        total = custom_ops.all_reduce(adapted(x, weight.base.weight, None, weight), weight.base.ranks)
        return total if bias is None else total + bias

    return ops._replace(linear=linear)
