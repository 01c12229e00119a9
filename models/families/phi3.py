"""Phi-3 and Phi-4-mini: LLaMA with fused tensors in its checkpoint, a rotated part of each head, LongRoPE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..fields import Fields
from ..layers import Attend, Ops
from ..registry import ModelDefinition, ParameterSpec, register_model
from ..rope_config import read_rope
from . import llama, mistral
from .llama import LayerWeights

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
OLD_NAMES_OF_LONGROPE = ("su", "yarn")


def config(fields: Fields) -> Mapping[str, Any]:
    """Mistral's window, and a rope that may rotate a part of a head."""
    return {**mistral.config(fields), "rope": read_rope(_with_new_names(fields), partial=True)}


def _with_new_names(fields: Fields) -> Fields:
    """The first checkpoints call LongRoPE otherwise."""
    changed = {}
    for place in ("rope_scaling", "rope_parameters"):
        rope = fields.object(place)
        for key in ("type", "rope_type"):
            if rope.get(key) in OLD_NAMES_OF_LONGROPE:
                changed[place] = rope = {**rope, key: "longrope"}
    for name in ("rope_theta", "partial_rotary_factor"):
        fields.number(name, None)
    return Fields({**fields.values, **changed}, fields.origin)


def parameters(config: ModelConfig) -> Mapping[str, ParameterSpec]:
    """LLaMA's, each of the fused ones from a single tensor."""
    specs = llama.parameters(config)
    for layer in range(config.num_layers):
        for name, module in (("qkv", "self_attn.qkv_proj"), ("gate_up", "mlp.gate_up_proj")):
            source = f"model.layers.{layer}.{module}.weight"
            spec = specs[f"layers.{layer}.{name}"]
            specs[f"layers.{layer}.{name}"] = replace(spec, sources=(source,))
    return specs


def forward(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    token_ids: Tensor,  # [T] int32
    positions: Tensor,  # [T] int32
    attend: Attend,
    ops: Ops,
) -> Tensor:
    """Hidden states [T, H] after the final norm."""
    rotated, rotation = config.rotary_dim, llama.rotation_at(weights, positions)

    def attention(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        query, key, value = llama.project(config, layer, x, ops)
        if rotated == config.head_dim:
            query, key = ops.rotary_embedding(query, key, *rotation)
        else:
            heads = ops.rotary_embedding(query[..., :rotated], key[..., :rotated], *rotation)
            query = torch.cat((heads[0], query[..., rotated:]), dim=-1)
            key = torch.cat((heads[1], key[..., rotated:]), dim=-1)
        return llama.attention_output(index, layer, query, key, value, attend, ops)

    def mlp(layer: LayerWeights, x: Tensor) -> Tensor:
        return llama.gated_mlp(config, layer, x, ops)

    embedded = ops.embedding(token_ids, weights["embedding"])
    return llama.decode(config, weights, embedded, attention, mlp, ops)


PHI3 = ModelDefinition(
    parameters=parameters, forward=forward, logits=llama.logits, config=config, defaults=DEFAULTS
)
register_model("Phi3ForCausalLM", PHI3)
