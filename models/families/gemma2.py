"""Gemma 2: LLaMA with norms before and after each part, GELU, soft caps, windows in every other layer."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, layer_types
from ..fields import Fields
from ..layers import Attend, Ops
from ..registry import ModelDefinition, ParameterSpec, register_model
from . import llama
from .llama import LayerWeights

# Every layer has these beside input_norm and post_norm, which is that of what attention adds.
MLP_NORMS = {"pre_mlp_norm": "pre_feedforward_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}


def config(fields: Fields) -> Mapping[str, Any]:
    """Layers slide and see all in turn, where `layer_types` does not say otherwise."""
    types = layer_types(fields, sliding=lambda index: index % 2 == 0)
    return {**shared_config(fields), "layer_types": types}


def shared_config(fields: Fields) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common; `hidden_act` is of Gemma 1, and `hidden_activation` wins."""
    fields.text("hidden_act", None)
    return {
        "hidden_act": fields.text("hidden_activation"),
        "sliding_window": fields.integer("sliding_window", None),
        "attention_scale": fields.number("query_pre_attn_scalar", positive=True) ** -0.5,
        "attention_soft_cap": fields.number("attn_logit_softcapping", None, positive=True),
        "logits_soft_cap": fields.number("final_logit_softcapping", None, positive=True),
        "embedding_scale": math.sqrt(fields.integer("hidden_size")),
    }


def parameters(config: ModelConfig) -> dict[str, ParameterSpec]:
    """LLaMA's, and the norms around the MLP."""
    specs = llama.parameters(config)
    for layer in range(config.num_layers):
        for name, module in MLP_NORMS.items():
            source = f"model.layers.{layer}.{module}.weight"
            specs[f"layers.{layer}.{name}"] = ParameterSpec(shape=(config.hidden_size,), sources=(source,))
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
    rotation = llama.rotation_at(weights, positions)

    def attention(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        query, key, value = llama.project(config, layer, x, ops)
        query, key = ops.rotary_embedding(query, key, *rotation)
        return llama.attention_output(index, layer, query, key, value, attend, ops)

    return decode(config, weights, token_ids, attention, ops)


def decode(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    token_ids: Tensor,
    attention: Callable[[int, LayerWeights, Tensor], Tensor],
    ops: Ops,
) -> Tensor:
    """Attention and MLP of every layer in turn, each between two norms."""
    eps = config.rms_norm_eps

    def norm(x: Tensor, name: str) -> Tensor:
        return ops.zero_centred_rms_norm(x, weights[name], eps)

    def add_norms(x: Tensor, residual: Tensor, own: str, following: str) -> tuple[Tensor, Tensor]:
        """What a part adds, behind its own norm, and the sum behind the norm of the part that follows."""
        return ops.add_zero_centred_rms_norm(norm(x, own), residual, weights[following], eps)

    embedded = ops.embedding(token_ids, weights["embedding"])
    residual = embedded * rounded(config.embedding_scale, embedded.dtype)
    x = norm(residual, "layers.0.input_norm")
    for index in range(config.num_layers):
        prefix, layer = f"layers.{index}", llama.layer_weights(weights, index)
        is_last = index + 1 == config.num_layers
        following = "final_norm" if is_last else f"layers.{index + 1}.input_norm"
        ops.show_residual(index, residual)
        x = attention(index, layer, x)
        x, residual = add_norms(x, residual, f"{prefix}.post_norm", f"{prefix}.pre_mlp_norm")
        x = llama.gated_mlp(config, layer, x, ops)
        x, residual = add_norms(x, residual, f"{prefix}.post_mlp_norm", following)
    ops.show_residual(config.num_layers, residual)
    return x


def rounded(value: float, dtype: torch.dtype) -> float:
    """A positive number as the dtype holds it: Gemma was trained with a factor of the weights' dtype."""
    unit = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value))
    return round(value / unit) * unit


def logits(config: ModelConfig, weights: Mapping[str, Tensor], hidden: Tensor, ops: Ops) -> Tensor:
    """Scores [n, vocab] of the next token after hidden states [n, H]."""
    scores, cap = llama.logits(config, weights, hidden, ops), config.logits_soft_cap
    return scores if cap is None else torch.tanh(scores / cap) * cap


GEMMA2 = ModelDefinition(
    parameters=parameters, forward=forward, logits=logits, config=config, defaults=DEFAULTS
)
register_model("Gemma2ForCausalLM", GEMMA2)
