"""FP8 (e4m3) as keys and values are stored: rounded from a number divided by a scale, exact when read."""

import math

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .fp8 import FP8, LARGEST, divided

WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # what FP8 is rounded from


def narrowed(rows: Tensor) -> Tensor:
    """The rows as kernels round them to FP8, which is from float32 where they are float64."""
    return rows.float() if rows.dtype == torch.float64 else rows


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x / scale in float32, clamped to +-448, rounded to the nearest, ties to even; a NaN stays a NaN."""
    return divided(x.float(), scale).clamp(-LARGEST, LARGEST).to(FP8)


def check_cache_dtypes(
    op: str, first: torch.dtype, second: torch.dtype, keys: torch.dtype, values: torch.dtype
) -> None:
    """ShapeError unless both tensors are of one dtype, and both caches of that one or of float8_e4m3fn."""
    if first == second and keys == values and (keys == first or (keys == FP8 and first in WIDE)):
        return
    got = f"tensors are {first}, {second}, caches {keys}, {values}"
    raise ShapeError(f"{op}: {got}; wanted one dtype, or caches in {FP8}")


def check_cache_scales(op: str, cache: torch.dtype, key_scale: float, value_scale: float) -> None:
    """ShapeError for scales of a cache that has none, and for scales that are not finite and positive."""
    scales = key_scale, value_scale
    if scales == (1.0, 1.0):
        return
    got = f"key_scale is {key_scale}, value_scale {value_scale}"
    if cache != FP8:
        raise ShapeError(f"{op}: {got} and the cache {cache}; wanted scales of 1, or a cache in {FP8}")
    if not all(math.isfinite(scale) and scale > 0 for scale in scales):
        raise ShapeError(f"{op}: {got}; wanted finite numbers above 0")
