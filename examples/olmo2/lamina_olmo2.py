"""OLMo 2: LLaMA whose norms come after each part, and whose queries and keys are normed over all heads."""

from collections.abc import Mapping

from torch import Tensor

from lamina.models import ModelDefinition, ParameterSpec
from lamina.models.config import ModelConfig
from lamina.models.families import llama
from lamina.models.layers import Attend, Ops


def parameters(config: ModelConfig) -> dict[str, ParameterSpec]:
    """LLaMA's without the norms before attention, and three norms more a layer."""
    specs = {name: spec for name, spec in llama.parameters(config).items() if not name.endswith("input_norm")}
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for layer in range(config.num_layers):
        for name, module, width in (
            ("q_norm", "self_attn.q_norm", heads),
            ("k_norm", "self_attn.k_norm", kv_heads),
            ("post_mlp_norm", "post_feedforward_layernorm", config.hidden_size),
        ):
            source = f"model.layers.{layer}.{module}.weight"
            specs[f"layers.{layer}.{name}"] = ParameterSpec(shape=(width,), sources=(source,))
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

    def norm(x: Tensor, name: str) -> Tensor:
        return ops.rms_norm(x.flatten(1), weights[name], config.rms_norm_eps).view(x.shape)

    x = ops.embedding(token_ids, weights["embedding"])
    for index in range(config.num_layers):
        prefix, layer = f"layers.{index}", llama.layer_weights(weights, index)
        query, key, value = llama.project(config, layer, x, ops)
        query, key = norm(query, f"{prefix}.q_norm"), norm(key, f"{prefix}.k_norm")
        query, key = ops.rotary_embedding(query, key, *rotation)
        added = llama.attention_output(index, layer, query, key, value, attend, ops)
        x = x + norm(added, f"{prefix}.post_norm")
        x = x + norm(llama.gated_mlp(config, layer, x, ops), f"{prefix}.post_mlp_norm")
    return norm(x, "final_norm")


OLMO2 = ModelDefinition(
    parameters=parameters, forward=forward, logits=llama.logits, defaults={"rms_norm_eps": 1e-5}
)
