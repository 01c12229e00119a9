"""Keys and values in int8: each head of a token as whole numbers, its scale behind them."""

import torch
from torch import Tensor

INT8 = torch.int8
SCALE_BYTES = 4  # a float32
LARGEST = 127.0


def cache_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a cache of this dtype has for a head of a token."""
    return head_dim + SCALE_BYTES if dtype == INT8 else head_dim


def to_int8(rows: Tensor) -> Tensor:
    """rows [..., D] as int8 [..., D + 4]: numbers, and the float32 that they are multiplied by.

    The scale is the largest size / 127; number = x / scale in float32, rounded to the nearest, ties to even.
    A row with a number that is not finite has a scale of NaN.
    """
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True) / LARGEST
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    numbers = (wide / divisors).clamp(-LARGEST, LARGEST).round().nan_to_num(0.0).to(INT8)
    finite = wide.isfinite().all(-1, keepdim=True)
    scales = torch.where(finite, scales, torch.full_like(scales, torch.nan))
    return torch.cat([numbers, scales.contiguous().view(INT8)], -1)


def from_int8(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 [..., D + 4] as numbers [..., D] of the dtype."""
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return stored[..., :-SCALE_BYTES].to(dtype) * scales.to(dtype)
