"""A model run op by op over a calibration text: projections are asked for once their inputs are there."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...custom_ops.paged_attention.reference import dense_attention
from ...custom_ops.rotary_embedding.reference import rotary_embedding
from ..layers import FAST_OPS, Ops
from ..registry import AttentionSpec
from ..rope import rotation_tables
from .source import SourceModel

Multiply = Callable[[str, Tensor], Tensor]  # the name of a parameter and inputs [T, K] to outputs [T, N]
DTYPE = torch.float32


class _Projection:
    """Stands for a projection's weight among the weights of a forward pass, by its parameter's name."""

    def __init__(self, name: str) -> None:
        self.name = name


@torch.inference_mode()
def run(
    source: SourceModel, windows: Sequence[Sequence[int]], multiply: Multiply, device: torch.device
) -> None:
    """One forward pass over windows of token ids, each a sequence of its own, in float32.

    `multiply` is called for each projection in turn with the inputs of all tokens, and what it returns is
    what later layers see: quantized weights, if it multiplies by those.
    """
    token_ids = torch.tensor([token for ids in windows for token in ids], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(len(ids), dtype=torch.int32, device=device) for ids in windows])
    rotations = rotation_tables(
        source.model, max_model_len=max(map(len, windows)), dtype=DTYPE, device=device
    )
    attention = source.definition.attention(source.model)
    lengths = [len(ids) for ids in windows]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        parts = zip(*(torch.split(each, lengths) for each in (query, key, value, out)), strict=True)
        for one_query, one_key, one_value, one_out in parts:
            one_out.copy_(_attention(attention[layer], one_query, one_key, one_value))

    weights = _weights(source, device) | rotations
    source.definition.forward(source.model, weights, token_ids, positions, attend, _ops(multiply))


def _attention(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return dense_attention(
        query,
        key,
        value,
        spec.scale,
        window=-1 if spec.window is None else spec.window,
        chunk=-1 if spec.chunk is None else spec.chunk,
        soft_cap=spec.soft_cap or 0.0,
    )


def _weights(source: SourceModel, device: torch.device) -> dict[str, Tensor]:
    """Every parameter but the projections, for which a name stands."""
    weights: dict[str, Any] = {}
    for name, spec in source.specs.items():
        if spec.projection:
            weights[name] = _Projection(name)
        elif spec.tied_to is None:
            parts = [source.tensors[each].read().to(device, DTYPE) for each in spec.sources]
            weights[name] = torch.cat(parts)
    tied = {name: spec.tied_to for name, spec in source.specs.items() if spec.tied_to}
    return weights | {name: weights[other] for name, other in tied.items() if name not in weights}


def _ops(multiply: Multiply) -> Ops:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        named = cast(object, weight)
        if not isinstance(named, _Projection):
            return FAST_OPS.linear(x, weight, bias)
        out = multiply(named.name, x)
        return out if bias is None else out + bias

    return FAST_OPS._replace(linear=linear, rotary_embedding=rotary_embedding)
