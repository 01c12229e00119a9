"""Projections kept like every other weight: in the dtype of the runtime, multiplied by Ops.linear."""

from collections.abc import Mapping

import torch

from .scheme import QuantScheme, Shape, register_scheme


def tensors(shape: Shape, dtype: torch.dtype) -> Mapping[str, tuple[Shape, torch.dtype]]:
    """One tensor."""
    return {"": (shape, dtype)}


UNQUANTIZED = QuantScheme(
    name=None,
    kept="in the runtime's dtype",
    devices=frozenset({"cpu", "cuda"}),
    tensors=tensors,
)
register_scheme(UNQUANTIZED)
