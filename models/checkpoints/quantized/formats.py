"""How one module lies in a checkpoint: its tensors, and the parts of a scheme that they become."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.errors import LoadError, UnsupportedError
from ....custom_ops.linear_w4a16.layout import OFFSET, pack
from ...quantization.fp8 import BLOCK, FP8, FP8_BLOCK, bounded
from ...quantization.int8 import INT8
from ...quantization.packing import unpack_int4
from ...quantization.scheme import QuantScheme, Shape
from ...quantization.unquantized import UNQUANTIZED
from ...quantization.w4a16 import w4a16

FLOATS = frozenset({"F32", "BF16", "F16"})  # as safetensors calls dtypes
E4M3, INT32 = frozenset({"F8_E4M3"}), frozenset({"I32"})
Tensors = Mapping[str, Tensor]  # of one module, by the names that Format.tensors has for them


class Expected(NamedTuple):
    """What the header of a tensor must say."""

    shapes: tuple[Shape, ...]  # any of them
    dtypes: frozenset[str]
    is_required: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How a module [out, in] lies in a checkpoint.

    `tensors(shape)` says what is expected, by names below the module's; a name may be several, "a|b", of
    which a checkpoint has one. `unpack(tensors, shape)` are the parts of the scheme in a float32 runtime, of
    a dense one the rows in float32; it raises LoadError, in words that follow the module's name.
    """

    name: str  # in messages
    scheme: QuantScheme
    tensors: Callable[[Shape], Mapping[str, Expected]]
    unpack: Callable[[Tensors, Shape], Sequence[Tensor]]

    @property
    def is_dequantized(self) -> bool:
        """Whether its weights are kept in the runtime's dtype."""
        return self.scheme.is_dense


def optional(*names: str) -> dict[str, Expected]:
    """Scales of activations, which are counted among a module's tensors and not used."""
    return {name: Expected(((), (1,), (1, 1)), FLOATS | {"I8", "I32"}, is_required=False) for name in names}


def by_rows(shape: Shape) -> tuple[Shape, ...]:
    """The shapes that a scale may have: one for all, or one a row."""
    return ((), (1,), (1, 1), shape[:1], (shape[0], 1))


def float8_rows(
    name: str, scale: str = "weight_scale", others: Sequence[str] = (), bound: float | None = None
) -> Format:
    """Numbers in e4m3, and a scale for all or for each row; `bound`: of activations."""

    def tensors(shape: Shape) -> dict[str, Expected]:
        own = {"weight": Expected((shape,), E4M3), scale: Expected(by_rows(shape), FLOATS)}
        return own | optional(*others)

    def unpack(given: Tensors, shape: Shape) -> tuple[Tensor, Tensor]:
        return given["weight"], expanded_rows(given[scale], shape)

    return Format(name=name, scheme=FP8 if bound is None else bounded(bound), tensors=tensors, unpack=unpack)


def float8_blocks(name: str, scale: str, others: Sequence[str] = ()) -> Format:
    """Numbers in e4m3, and a scale for each block of 128 rows and columns, the last of which may be short."""

    def tensors(shape: Shape) -> dict[str, Expected]:
        blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        own = {"weight": Expected((shape,), E4M3)}
        own[scale] = Expected((blocks,), FLOATS | {"F8_E8M0", "U8"})
        return own | optional(*others)

    def unpack(given: Tensors, shape: Shape) -> tuple[Tensor, Tensor]:
        scales = powers_of_two(given[scale])
        return given["weight"], scales.repeat_interleave(BLOCK, dim=0)[: shape[0]]

    return Format(name=name, scheme=FP8_BLOCK, tensors=tensors, unpack=unpack)


def float8_groups(name: str, scale: str, others: Sequence[str] = ()) -> Format:
    """Numbers in e4m3, and a scale for each 128 columns of a row."""

    def tensors(shape: Shape) -> dict[str, Expected]:
        groups = (shape[0], -(-shape[1] // BLOCK))
        return {"weight": Expected((shape,), E4M3), scale: Expected((groups,), FLOATS)} | optional(*others)

    def unpack(given: Tensors, shape: Shape) -> tuple[Tensor, Tensor]:
        return given["weight"], given[scale].to(torch.float32)

    return Format(name=name, scheme=FP8_BLOCK, tensors=tensors, unpack=unpack)


def int8_rows(name: str, others: Sequence[str] = ()) -> Format:
    """Whole numbers from -128 to 127, and a scale for all or for each row."""

    def tensors(shape: Shape) -> dict[str, Expected]:
        own = {"weight": Expected((shape,), frozenset({"I8"}))}
        own["weight_scale"] = Expected(by_rows(shape), FLOATS)
        azp = {"azp_adj": Expected((shape[:1], (shape[0], 1), (1, shape[0])), INT32, is_required=False)}
        return own | azp | optional(*others)

    def unpack(given: Tensors, shape: Shape) -> tuple[Tensor, Tensor]:
        return given["weight"], expanded_rows(given["weight_scale"], shape)

    return Format(name=name, scheme=INT8, tensors=tensors, unpack=unpack)


def dequantized(
    name: str,
    tensors: Callable[[Shape], Mapping[str, Expected]],
    rows: Callable[[Tensors, Shape], Tensor],
) -> Format:
    """A format that is multiplied as it lies by no scheme: its rows are kept in the runtime's dtype."""

    def unpack(given: Tensors, shape: Shape) -> tuple[Tensor]:
        own = rows(given, shape)
        if not bool(own.isfinite().all()):
            raise LoadError("has scales or a table by which its weights are not finite")
        return (own,)

    return Format(name=name, scheme=UNQUANTIZED, tensors=tensors, unpack=unpack)


def restored(form: Format) -> Format:
    """The same tensors, kept in the runtime's dtype."""

    def rows(given: Tensors, shape: Shape) -> Tensor:
        return form.scheme.restore(form.unpack(given, shape))

    return dequantized(form.name, form.tensors, rows)


def four_bits(group: int, *, zero: bool, order: bool) -> QuantScheme:
    """The scheme for groups of so many columns, -1: all; UnsupportedError for those that are not served."""
    if group not in (32, 64, 128, -1):
        raise UnsupportedError(f"group_size is {group}; served are 32, 64, 128 and -1")
    return w4a16(group, zero=zero, order=order and group != -1)


def four_bit_parts(
    numbers: Tensor,  # uint8 [out, in], 0 to 15, columns as the checkpoint has them
    scale: Tensor,  # [out, groups]
    zero: Tensor | None,  # whole numbers [out, groups], of which w = (number - zero) * scale
    group_of: Tensor | None,  # int32 [in], the group of each column, where the scheme has an order
) -> list[Tensor]:
    """The parts of a w4a16 scheme. LoadError for groups that are not equally large."""
    order = None
    if group_of is not None:
        columns, groups = numbers.shape[1], scale.shape[1]
        counts = torch.bincount(group_of.clamp(0, groups).long(), minlength=groups)
        if bool((group_of < 0).any()) or counts.tolist() != [columns // groups] * groups:
            raise LoadError(f"has a g_idx that does not put {columns} columns into {groups} equal groups")
        order = torch.argsort(group_of, stable=True)
        numbers = numbers.index_select(1, order)
    scale = scale.to(torch.float32)
    zeros = [] if zero is None else [(OFFSET - zero.to(torch.float32)) * scale]
    return [
        pack(numbers),
        scale,
        *zeros,
        *([] if order is None else [order.to(torch.int32)]),
    ]


def nibbles(words: Tensor, count: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """uint8, the numbers from 0 to 15 in words of eight along a dimension."""
    own = unpack_int4(words, count, dim) if order is None else unpack_int4(words, count, dim, order)
    return own.to(torch.uint8)


def expanded_rows(scale: Tensor, shape: Shape) -> Tensor:
    """A scale a row [out] in float32, of one a row or one for all."""
    return scale.to(torch.float32).reshape(-1).expand(shape[0])


def powers_of_two(scale: Tensor) -> Tensor:
    """Scales in float32, of bytes that are exponents (e8m0) too. LoadError for the byte that is no number."""
    if scale.dtype.is_floating_point and scale.dtype.itemsize > 1:
        return scale.to(torch.float32)
    exponents = scale.view(torch.uint8).to(torch.int32)
    if bool((exponents == 255).any()):
        raise LoadError("has scales that are not finite")
    return torch.exp2((exponents - 127).to(torch.float64)).to(torch.float32)
