"""Checkpoints made of GGUF files whose blocks of weights were kept as they lie."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ....common.errors import LoadError
from ....custom_ops.linear._cuda import HOPPER
from ....custom_ops.linear_blocks.layout import KINDS
from ....custom_ops.linear_w4a16.layout import OFFSET, pack
from ...fields import Fields
from ...quantization.blocks import in_blocks
from ...quantization.scheme import Shape
from ...quantization.w4a16 import w8a16
from .dialect import Dialect, require
from .formats import Expected, Format, Tensors, four_bits

METHOD = "gguf"  # as config.json names it, where `modules` says which kind each module is of
TENSOR = "blocks"  # of a module: [out, bytes of a row]
COLUMNS = 32  # of a block
# float16 numbers before the bytes of a block: its scale, and its minimum
HEADS = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}
# How projections are kept, and which kinds: in groups of w4a16 or w8a16, of w4a16 alone, or as they are.
KEPT = {"groups": tuple(HEADS), "four_bit_groups": ("Q4_0", "Q4_1"), "blocks": tuple(KINDS)}


def kept_as(device: torch.device) -> str:
    """How a device keeps projections, a key of KEPT.

    GPUs without the kernel of weights of eight bits would write them out at every step, at more than the
    bytes of dequantized ones.
    """
    if device.type != "cuda":
        return "blocks"
    has_kernel = not torch.cuda.is_available() or torch.cuda.get_device_capability(device) == HOPPER
    return "groups" if has_kernel else "four_bit_groups"


def read(fields: Fields) -> Dialect:
    """The dialect of a config that a conversion wrote. UnsupportedError for a kind that is not kept."""
    kinds, way = fields.object("modules"), fields.text("kept_as")
    require(fields, "kept_as", way, tuple(KEPT))
    for name, kind in kinds.items():
        require(fields, f"modules.{name}", kind, KEPT[way])
    forms = {kind: _format(kind, way) for kind in KEPT[way]}
    return Dialect(
        name=METHOD,
        format_of=lambda module: forms[kinds[module]] if module in kinds else None,
        has_tied=True,
    )


def _format(kind: str, way: str) -> Format:
    def tensors(shape: Shape) -> Mapping[str, Expected]:
        size = shape[0], KINDS[kind].row_bytes(shape[1])
        return {TENSOR: Expected((size,), frozenset({"U8"}))}

    def unpack(given: Tensors, shape: Shape) -> tuple[Tensor, ...]:
        return unpack_blocks(given[TENSOR], shape, kind)

    def take(given: Tensors, shape: Shape) -> tuple[Tensor, ...]:
        return (checked(given[TENSOR], kind),)

    name = f"GGUF {kind}"
    if way == "blocks":
        return Format(name=name, scheme=in_blocks(kind), tensors=tensors, unpack=take)
    scheme = w8a16(COLUMNS) if kind == "Q8_0" else four_bits(COLUMNS, zero=HEADS[kind] > 1, order=False)
    return Format(name=name, scheme=scheme, tensors=tensors, unpack=unpack)


def checked(rows: Tensor, kind: str) -> Tensor:
    """The rows of blocks. LoadError where scales are not finite."""
    blocks = torch.unflatten(rows, 1, (-1, KINDS[kind].num_bytes))
    regions = KINDS[kind].regions
    for part, (_, unit) in zip(
        torch.split(blocks, [size for size, _ in regions], dim=2), regions, strict=True
    ):
        if unit == 2 and not bool(part.contiguous().view(torch.float16).isfinite().all()):
            raise LoadError("has scales that are not finite")
    return rows


def unpack_blocks(rows: Tensor, shape: Shape, kind: str) -> tuple[Tensor, ...]:
    """Numbers, scales, and what 8 of four bits stands for. LoadError where scales are not finite."""
    heads = HEADS[kind]
    blocks = rows.view(shape[0], shape[1] // COLUMNS, -1)
    head = blocks[:, :, : 2 * heads].contiguous().view(torch.float16).to(torch.float32)
    if not bool(head.isfinite().all()):
        raise LoadError("has scales that are not finite")
    if kind == "Q8_0":
        return blocks[:, :, 2 * heads :].view(torch.int8).flatten(1), head[:, :, 0]
    halves = blocks[:, :, 2 * heads :]  # the first 16 columns in the low four bits
    numbers = torch.cat((halves & 15, halves >> 4), dim=2).flatten(1)
    scale = head[:, :, 0]
    zero = () if heads == 1 else (head[:, :, 1] + OFFSET * scale,)
    return pack(numbers), scale, *zero
