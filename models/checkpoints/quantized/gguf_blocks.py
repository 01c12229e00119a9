"""Checkpoints made of GGUF files whose blocks of 32 four-bit weights were kept as they lie: Q4_0, Q4_1."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....common.errors import LoadError
from ....custom_ops.linear_w4a16.layout import pack
from ...fields import Fields
from ...quantization.scheme import Shape
from ...quantization.w4a16 import OFFSET
from .dialect import Dialect, require
from .formats import Expected, Format, Tensors, four_bits

METHOD = "gguf"  # as config.json names it, where `modules` says which kind each module is of
TENSOR = "blocks"  # of a module: [out, bytes of a row]
COLUMNS = 32  # of a block
HEADS = {"Q4_0": 1, "Q4_1": 2}  # float16 numbers before the bytes of a block: its scale, and its minimum


def read(fields: Fields) -> Dialect:
    """The dialect of a config that a conversion wrote. UnsupportedError for a kind that is not kept."""
    kinds = fields.object("modules")
    for name, kind in kinds.items():
        require(fields, f"modules.{name}", kind, tuple(HEADS))
    forms = {kind: _format(kind) for kind in HEADS}
    return Dialect(name=METHOD, format_of=lambda module: forms[kinds[module]] if module in kinds else None)


def row_bytes(columns: int, kind: str) -> int:
    """Bytes of so many columns."""
    return columns // COLUMNS * (2 * HEADS[kind] + COLUMNS // 2)


def _format(kind: str) -> Format:
    def tensors(shape: Shape) -> Mapping[str, Expected]:
        return {TENSOR: Expected(((shape[0], row_bytes(shape[1], kind)),), frozenset({"U8"}))}

    def unpack(given: Tensors, shape: Shape) -> tuple[Tensor, ...]:
        return unpack_blocks(given[TENSOR], shape, kind)

    scheme = four_bits(COLUMNS, zero=HEADS[kind] > 1, order=False)
    return Format(name=f"GGUF {kind}", scheme=scheme, tensors=tensors, unpack=unpack)


def unpack_blocks(rows: Tensor, shape: Shape, kind: str) -> tuple[Tensor, ...]:
    """Numbers, scales and what the number 8 stands for. LoadError where scales are not finite."""
    heads = HEADS[kind]
    blocks = rows.view(shape[0], shape[1] // COLUMNS, -1)
    head = blocks[:, :, : 2 * heads].contiguous().view(torch.float16).to(torch.float32)
    if not bool(head.isfinite().all()):
        raise LoadError("has scales that are not finite")
    halves = blocks[:, :, 2 * heads :]  # the first 16 columns in the low four bits
    numbers = torch.cat((halves & 15, halves >> 4), dim=2).flatten(1)
    scale = head[:, :, 0]
    zero = () if heads == 1 else (head[:, :, 1] + OFFSET * scale,)
    return pack(numbers), scale, *zero
