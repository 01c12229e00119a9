"""What pooled hidden states go through before they are a result: Dense modules, read and applied."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...common.errors import LoadError, UnsupportedError, shown
from ..checkpoints.shards import SINGLE_NAME, opened
from ..layers import Linear
from .spec import Dense

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": functional.relu,
    "GELU": functional.gelu,
    "SiLU": functional.silu,
    "Sigmoid": torch.sigmoid,
}


class DenseWeights(NamedTuple):
    """A Dense module's tensors, [out, in] and [out], and its activation."""

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]


def check_dense(modules: Sequence[Dense]) -> None:
    """Raise UnsupportedError for a module whose activation is not served."""
    for module in modules:
        if module.activation not in ACTIVATIONS:
            raise UnsupportedError(
                f"{module.folder}/config.json: activation_function is {shown(module.activation)}; served are "
                f"{', '.join(ACTIVATIONS)}"
            )


def load_dense(
    folder: Path, modules: Sequence[Dense], dtype: torch.dtype, device: torch.device
) -> list[DenseWeights]:
    """Every Dense module of a checkpoint. LoadError for files that are missing, or hold something else."""
    return [_load(folder / module.folder / SINGLE_NAME, module, dtype, device) for module in modules]


def _load(path: Path, module: Dense, dtype: torch.dtype, device: torch.device) -> DenseWeights:
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (module.out_features, module.in_features)}
    if module.bias:
        shapes["linear.bias"] = (module.out_features,)
    with opened(path) as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    if {name: tuple(tensor.shape) for name, tensor in held.items()} != shapes:
        got = {name: list(tensor.shape) for name, tensor in held.items()}
        raise LoadError(f"{path} holds {shown(got)}; its config calls for {shown(shapes)}")
    weight, *bias = (held[name].to(device, dtype) for name in shapes)
    return DenseWeights(weight, bias[0] if bias else None, ACTIVATIONS[module.activation])


def apply_dense(modules: Sequence[DenseWeights], vectors: Tensor, linear: Linear) -> Tensor:
    """Vectors [n, in of the first] behind every module, [n, out of the last]."""
    for module in modules:
        vectors = module.activation(linear(vectors, module.weight, module.bias))
    return vectors
