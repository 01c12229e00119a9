"""SmolLM3: LLaMA with layers that do not rotate, every fourth of them as published."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..config import ModelConfig, layer_types, num_layers
from ..fields import Fields
from ..layers import Attend, Ops
from ..registry import ModelDefinition, register_model
from . import llama
from .llama import LayerWeights

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}


def config(fields: Fields) -> Mapping[str, Any]:
    """Which layers rotate; those that do not may slide."""
    number, interval = num_layers(fields), fields.integer("no_rope_layer_interval")
    given = fields.numbers("no_rope_layers")  # 1 where a layer rotates, whatever the name says
    if set(given) - {0, 1} or 0 < len(given) < number:
        raise fields.error("no_rope_layers", list(given), f"0 or 1 for each of {number} layers")
    rotated = tuple(bool(flag) for flag in given[:number]) or tuple(
        (index + 1) % interval != 0 for index in range(number)
    )
    window = fields.integer("sliding_window", None)
    if not fields.boolean("use_sliding_window", False):
        window = None
    types = layer_types(fields, sliding=lambda index: window is not None and not rotated[index])
    return {"rotated_layers": rotated, "sliding_window": window, "layer_types": types}


def forward(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    token_ids: Tensor,  # [T] int32
    positions: Tensor,  # [T] int32
    attend: Attend,
    ops: Ops,
) -> Tensor:
    """Hidden states [T, H] after the final norm."""
    rotation = llama.rotation_at(weights, positions)

    def attention(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        query, key, value = llama.project(config, layer, x, ops)
        if config.rotated_layers[index]:
            query, key = ops.rotary_embedding(query, key, *rotation)
        return llama.attention_output(index, layer, query, key, value, attend, ops)

    def mlp(layer: LayerWeights, x: Tensor) -> Tensor:
        return llama.gated_mlp(config, layer, x, ops)

    embedded = ops.embedding(token_ids, weights["embedding"])
    return llama.decode(config, weights, embedded, attention, mlp, ops)


SMOLLM3 = ModelDefinition(
    parameters=llama.parameters, forward=forward, logits=llama.logits, config=config, defaults=DEFAULTS
)
register_model("SmolLM3ForCausalLM", SMOLLM3)
