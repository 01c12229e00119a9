"""Qwen3: LLaMA whose queries and keys are normed head by head before they are rotated."""

from collections.abc import Mapping

from torch import Tensor

from ..config import ModelConfig
from ..layers import Attend, Ops
from ..registry import ModelDefinition, ParameterSpec, register_model
from . import llama
from .llama import LayerWeights
from .qwen2 import WINDOW_DEFAULTS, windows


def parameters(config: ModelConfig) -> Mapping[str, ParameterSpec]:
    """LLaMA's, and a norm each for the heads of queries and keys of every layer."""
    return llama.parameters(config) | head_norms(config)


def head_norms(config: ModelConfig) -> dict[str, ParameterSpec]:
    """The norms [D] of query and key heads."""
    return {
        f"layers.{layer}.{name}": ParameterSpec(
            shape=(config.head_dim,), sources=(f"model.layers.{layer}.self_attn.{name}.weight",)
        )
        for layer in range(config.num_layers)
        for name in ("q_norm", "k_norm")
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
    eps, rotation = config.rms_norm_eps, llama.rotation_at(weights, positions)

    def attention(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        query, key, value = llama.project(config, layer, x, ops)
        query = ops.rms_norm(query, weights[f"layers.{index}.q_norm"], eps)
        key = ops.rms_norm(key, weights[f"layers.{index}.k_norm"], eps)
        query, key = ops.rotary_embedding(query, key, *rotation)
        return llama.attention_output(index, layer, query, key, value, attend, ops)

    def mlp(layer: LayerWeights, x: Tensor) -> Tensor:
        return llama.gated_mlp(config, layer, x, ops)

    embedded = ops.embedding(token_ids, weights["embedding"])
    return llama.decode(config, weights, embedded, attention, mlp, ops)


QWEN3 = ModelDefinition(
    parameters=parameters,
    forward=forward,
    logits=llama.logits,
    config=windows,
    defaults={**WINDOW_DEFAULTS, "head_dim": 128},
)
register_model("Qwen3ForCausalLM", QWEN3)
