"""Granite 3: LLaMA with a factor on embeddings, on what attention and MLP add, on scores and on logits."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..config import ModelConfig
from ..fields import Fields
from ..layers import Attend, Ops
from ..registry import ModelDefinition, register_model
from . import llama
from .llama import LayerWeights


def config(fields: Fields) -> Mapping[str, Any]:
    """The four factors."""
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "attention_scale": fields.number("attention_multiplier", 1.0, positive=True),
        "logits_divisor": fields.number("logits_scaling", 1.0, positive=True),
    }


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
        query, key = ops.rotary_embedding(query, key, *rotation)
        out = llama.attention_output(index, layer, query, key, value, attend, ops)
        return out * config.residual_scale

    def mlp(layer: LayerWeights, x: Tensor) -> Tensor:
        return llama.gated_mlp(config, layer, x, ops) * config.residual_scale

    embedded = ops.embedding(token_ids, weights["embedding"]) * config.embedding_scale
    return llama.decode(config, weights, embedded, attention, mlp, ops)


def logits(config: ModelConfig, weights: Mapping[str, Tensor], hidden: Tensor, ops: Ops) -> Tensor:
    """Scores [n, vocab] of the next token after hidden states [n, H]."""
    return llama.logits(config, weights, hidden, ops) / config.logits_divisor


GRANITE = ModelDefinition(parameters=llama.parameters, forward=forward, logits=logits, config=config)
register_model("GraniteForCausalLM", GRANITE)
