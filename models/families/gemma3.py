"""Gemma 3 for text: Gemma 2 with normed heads, and five sliding layers, of their own rope, to a full one."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..config import ModelConfig, layer_types
from ..fields import Fields
from ..layers import Attend, Ops
from ..registry import ModelDefinition, ParameterSpec, register_model
from ..rope_config import RopeConfig, read_rope
from . import gemma2, llama
from .llama import LayerWeights
from .qwen3 import head_norms

DEFAULTS = {
    **gemma2.DEFAULTS,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}


def config(fields: Fields) -> Mapping[str, Any]:
    """Gemma 2's, every sixth layer seeing all, and a rope for each of the two kinds."""
    pattern = fields.integer("sliding_window_pattern")
    types = layer_types(fields, sliding=lambda index: (index + 1) % pattern != 0)
    own = {**gemma2.shared_config(fields), "layer_types": types}
    own["rope"] = _rope(fields, "full_attention", "rope_theta")
    own["sliding_rope"] = _rope(fields, "sliding_attention", "rope_local_base_freq")
    return own


def _rope(fields: Fields, kind: str, theta: str) -> RopeConfig:
    """Of one kind of layers: its own object in `rope_parameters`, else, as before, `rope_scaling` for all
    that is not sliding, and a field for the theta of each."""
    parameters = fields.object("rope_parameters")
    of_kind = Fields(parameters, f"{fields.origin}: rope_parameters").object(kind)
    scaling = fields.object("rope_scaling") if kind == "full_attention" and not of_kind else {}
    values = {
        "rope_parameters": of_kind or scaling,
        "rope_theta": fields.number(theta, positive=True),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
    }
    return read_rope(Fields(values, f"{fields.origin}: {kind}"))


def parameters(config: ModelConfig) -> Mapping[str, ParameterSpec]:
    """Gemma 2's, and a norm each for the heads of queries and keys of every layer."""
    return gemma2.parameters(config) | head_norms(config)


def forward(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    token_ids: Tensor,  # [T] int32
    positions: Tensor,  # [T] int32
    attend: Attend,
    ops: Ops,
) -> Tensor:
    """Hidden states [T, H] after the final norm."""
    eps, is_sliding = config.rms_norm_eps, config.sliding_layers
    full, sliding = (llama.rotation_at(weights, positions, name) for name in ("rope", "sliding_rope"))

    def attention(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        query, key, value = llama.project(config, layer, x, ops)
        query = ops.zero_centred_rms_norm(query, weights[f"layers.{index}.q_norm"], eps)
        key = ops.zero_centred_rms_norm(key, weights[f"layers.{index}.k_norm"], eps)
        query, key = ops.rotary_embedding(query, key, *(sliding if is_sliding[index] else full))
        return llama.attention_output(index, layer, query, key, value, attend, ops)

    return gemma2.decode(config, weights, token_ids, attention, ops)


GEMMA3 = ModelDefinition(
    parameters=parameters, forward=forward, logits=gemma2.logits, config=config, defaults=DEFAULTS
)
register_model("Gemma3ForCausalLM", GEMMA3)
