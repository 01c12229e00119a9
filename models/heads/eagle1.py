"""EAGLE-1: a LLaMA layer without a first norm, on a projection of embedding and hidden state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..families import llama
from ..families.llama import LayerWeights
from ..fields import Fields
from ..layers import Attend, Ops
from ..registry import ParameterSpec, register_model
from ..sharding import ROWS
from .definition import STATES, HeadConfig, HeadDefinition, head_config

ARCHITECTURE = "EagleLlamaForCausalLM"


def config(fields: Fields) -> Mapping[str, Any]:
    """What only heads have."""
    hidden = fields.integer("hidden_size")
    own = HeadConfig(
        draft_vocab_size=fields.integer("vocab_size"), target_hidden_size=hidden, has_lm_head=False
    )
    return {"own": own, "tie_word_embeddings": False}


def parameters(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Every weight by name; embedding and LM head are the target's where the checkpoint has none."""
    own, hidden = head_config(config), config.hidden_size
    specs = ends(config) | {
        "fc": ParameterSpec(shape=(hidden, 2 * hidden), sources=(f"{own.prefix}fc.weight",), projection=True)
    }
    if own.fc_bias:
        specs["fc_bias"] = ParameterSpec(shape=(hidden,), sources=(f"{own.prefix}fc.bias",))
    for layer in range(config.num_layers):
        for name, spec in llama.layer_parameters(config, f"{own.prefix}layers.{layer}").items():
            if (layer, name) != (0, "input_norm"):
                specs[f"layers.{layer}.{name}"] = spec
    return specs


def ends(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Embedding and LM head, as far as the head has them."""
    own, found = head_config(config), {}
    if own.has_embedding:
        shape, sources = (config.vocab_rows, config.hidden_size), (f"{own.prefix}embed_tokens.weight",)
        found["embedding"] = ParameterSpec(shape=shape, sources=sources, table=True, shard_axis=ROWS)
    if own.has_lm_head:
        shape, sources = (-(-own.draft_vocab_size // config.ranks), config.hidden_size), ("lm_head.weight",)
        found["lm_head"] = ParameterSpec(shape=shape, sources=sources, projection=True, shard_axis=ROWS)
    return found


def forward(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    token_ids: Tensor,  # [T] int32, each the token behind its position
    positions: Tensor,  # [T] int32
    attend: Attend,
    ops: Ops,
) -> Tensor:
    """States [T, H] that stand for the target's hidden states one token on."""
    embedded = ops.embedding(token_ids, weights["embedding"])
    joined = torch.cat((embedded, weights[STATES]), dim=-1)
    residual = ops.linear(joined, weights["fc"], weights.get("fc_bias"))
    return run_layers(config, weights, residual, residual, positions, attend, ops)


def run_layers(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    x: Tensor,  # what attention of the first layer takes
    residual: Tensor,  # [T, H]
    positions: Tensor,
    attend: Attend,
    ops: Ops,
) -> Tensor:
    """The sum [T, H] of the residual and what every layer adds."""
    eps, rotation = config.rms_norm_eps, llama.rotation_at(weights, positions)
    for index in range(config.num_layers):
        layer: LayerWeights = llama.layer_weights(weights, index)
        if index:
            x, residual = ops.add_rms_norm(x, residual, layer.input_norm, eps)
        query, key, value = llama.project(config, layer, x, ops)
        query, key = ops.rotary_embedding(query, key, *rotation)
        x = llama.attention_output(index, layer, query, key, value, attend, ops)
        x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
        x = llama.gated_mlp(config, layer, x, ops)
    return x + residual


def combine(config: ModelConfig, weights: Mapping[str, Tensor], states: Tensor, ops: Ops) -> Tensor:
    """The target's hidden states as they are: the first projection is of every token."""
    return states


def no_layers(head: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """The hidden states after the final norm are all that it is given."""
    return ()


EAGLE1 = HeadDefinition(
    parameters=parameters,
    forward=forward,
    logits=llama.logits,
    config=config,
    combine=combine,
    layers_read=no_layers,
)
register_model(ARCHITECTURE, EAGLE1)
