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
DENSE = QuantScheme(  # the same by a name, for files whose blocks would else be kept
    name="dense",
    kept=UNQUANTIZED.kept,
    devices=UNQUANTIZED.devices,
    tensors=tensors,
)
register_scheme(UNQUANTIZED)
register_scheme(DENSE)
