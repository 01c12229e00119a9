"""Projections in one byte a weight: whole numbers from -127 to 127, and the scale of each row."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ... import custom_ops
from ...custom_ops._shared.fp8 import divided
from .scheme import Parts, QuantScheme, Shape, cut_numbers, largest_of, register_scheme

LARGEST = 127  # symmetric: -128 is left out, so that a weight and its negative cost the same error


def tensors(shape: Shape, dtype: torch.dtype) -> Mapping[str, tuple[Shape, torch.dtype]]:
    """The bytes [out, in], and the scales [out]."""
    return {"": (shape, torch.int8), "scale": (shape[:1], torch.float32)}


def store(rows: Tensor, parts: Parts) -> None:
    """Each row by the scale that its largest weight gives. LoadError where that is not finite."""
    values, scale = parts
    scale.copy_(divided(largest_of(rows), LARGEST))
    steps = rows / torch.where(scale > 0, scale, 1.0)[:, None]
    values.copy_(steps.round_())


def restore(parts: Parts) -> Tensor:
    """Each byte by its row's scale."""
    values, scale = parts
    return values * scale[:, None]


def multiply(x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
    """lamina::linear_int8 on CPUs, where weights alone take time; lamina::linear_w8a8 on GPUs."""
    values, scale = parts
    linear = custom_ops.linear_int8 if x.device.type == "cpu" else custom_ops.linear_w8a8
    return linear(x, values, scale, bias)


def share(columns: int, count: int) -> QuantScheme:
    """The same: a row's scale is that of its parts."""
    return INT8


INT8 = QuantScheme(
    name="int8",
    kept="in one byte a weight",
    devices=frozenset({"cpu", "cuda"}),
    tensors=tensors,
    store=store,
    restore=restore,
    multiply=multiply,
    op="linear_int8",
    share=share,
    cut=cut_numbers,
)
register_scheme(INT8)
