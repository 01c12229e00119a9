"""Weights in NVFP4: numbers of four bits in e2m1, a scale in e4m3 for each 16, and one for all of them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...quantization.scheme import Shape
from .formats import E4M3, Expected, Format, Tensors, dequantized, optional

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; the fourth bit is the sign
GROUP = 16  # columns with one scale


def nvfp4(name: str, packed: str, scale_of_all: str, *, divide: bool) -> Format:
    """The format where the scale of all is divided by, or multiplied by."""

    def tensors(shape: Shape) -> Mapping[str, Expected]:
        rows, columns = shape
        own = {
            packed: Expected(((rows, -(-columns // 2)),), frozenset({"U8"})),
            "weight_scale": Expected(((rows, -(-columns // GROUP)),), E4M3),
            scale_of_all: Expected(((), (1,)), frozenset({"F32"})),
        }
        return own | optional("input_scale", "input_global_scale")

    def rows(given: Tensors, shape: Shape) -> Tensor:
        of_all = given[scale_of_all].to(torch.float32).reshape(())
        scale = given["weight_scale"].to(torch.float32)
        scale = scale / of_all if divide else scale * of_all
        return unpacked(given[packed])[:, : shape[1]] * scale.repeat_interleave(GROUP, dim=1)[:, : shape[1]]

    return dequantized(name, tensors, rows)


def unpacked(packed: Tensor) -> Tensor:
    """float32 [n, 2 * bytes] of e2m1 in bytes [n, bytes]: the even column in the low four bits."""
    numbers = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    sizes = torch.tensor([*SIZES, *(-size for size in SIZES)], device=packed.device)
    return sizes[numbers.long()]
