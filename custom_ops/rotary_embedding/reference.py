"""The formula of lamina::rotary_embedding."""

import torch
from torch import Tensor

from .._shared.precision import accumulation_dtype


def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(x1 * cos - x2 * sin, x2 * cos + x1 * sin) for the halves x1, x2 of every head of query and key."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(accumulation_dtype(x.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
