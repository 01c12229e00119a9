"""LLaMA 1 to 3.2: RMSNorm, rotary attention with grouped heads, SiLU-gated MLP."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from ..config import ModelConfig
from ..layers import Attend, Ops
from ..registry import ModelDefinition, ParameterSpec, register_model
from ..sharding import COLUMNS, ROWS


class LayerWeights(NamedTuple):
    """One layer's weights, named as they are in the weight table below "layers.{i}."."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(Hq + 2 Hkv) D, H]
    o: Tensor  # [H, Hq D]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]
    qkv_bias: Tensor | None
    o_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def parameters(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Every weight by name, with the checkpoint tensors it is made of."""
    embedding_shape = (config.vocab_rows, config.hidden_size)
    specs = {
        "embedding": ParameterSpec(
            shape=embedding_shape, sources=("model.embed_tokens.weight",), table=True, shard_axis=ROWS
        )
    }
    for layer in range(config.num_layers):
        for name, spec in layer_parameters(config, f"model.layers.{layer}").items():
            specs[f"layers.{layer}.{name}"] = spec
    specs["final_norm"] = ParameterSpec(shape=(config.hidden_size,), sources=("model.norm.weight",))
    tied_to = "embedding" if config.tie_word_embeddings else None
    specs["lm_head"] = ParameterSpec(
        shape=embedding_shape,
        sources=("lm_head.weight",),
        tied_to=tied_to,
        projection=True,
        shard_axis=ROWS,
    )
    return specs


def layer_parameters(config: ModelConfig, prefix: str) -> dict[str, ParameterSpec]:
    """The weights of one layer, whose modules the checkpoint has below `prefix`."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_rows, key_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
    gate_up = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    qkv_rows = (query_rows, key_rows, key_rows)

    def norm(name: str) -> ParameterSpec:
        return ParameterSpec(shape=(hidden,), sources=(f"{prefix}.{name}.weight",))

    def linear(modules: tuple[str, ...], rows: tuple[int, ...], columns: int, axis: int) -> ParameterSpec:
        sources = tuple(f"{m}.weight" for m in modules)
        shape = (sum(rows), columns)
        return ParameterSpec(shape=shape, sources=sources, rows=rows, projection=True, shard_axis=axis)

    def bias(modules: tuple[str, ...], rows: tuple[int, ...], axis: int | None = None) -> ParameterSpec:
        sources = tuple(f"{m}.bias" for m in modules)
        return ParameterSpec(shape=(sum(rows),), sources=sources, rows=rows, shard_axis=axis)

    specs = {
        "input_norm": norm("input_layernorm"),
        "qkv": linear(qkv, qkv_rows, hidden, ROWS),
        "o": linear((f"{attention}.o_proj",), (hidden,), query_rows, COLUMNS),
        "post_norm": norm("post_attention_layernorm"),
        "gate_up": linear(gate_up, (intermediate, intermediate), hidden, ROWS),
        "down": linear((f"{mlp}.down_proj",), (hidden,), intermediate, COLUMNS),
    }
    if config.attention_bias:
        specs |= {"qkv_bias": bias(qkv, qkv_rows, ROWS), "o_bias": bias((f"{attention}.o_proj",), (hidden,))}
    if config.mlp_bias:
        specs |= {
            "gate_up_bias": bias(gate_up, (intermediate,) * 2, ROWS),
            "down_bias": bias((f"{mlp}.down_proj",), (hidden,)),
        }
    return specs


def forward(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    token_ids: Tensor,  # [T] int32
    positions: Tensor,  # [T] int32
    attend: Attend,
    ops: Ops,
) -> Tensor:
    """Hidden states [T, H] after the final norm; tokens see each other through `attend` alone."""
    rotation = rotation_at(weights, positions)

    def attention(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        query, key, value = project(config, layer, x, ops)
        query, key = ops.rotary_embedding(query, key, *rotation)
        return attention_output(index, layer, query, key, value, attend, ops)

    def mlp(layer: LayerWeights, x: Tensor) -> Tensor:
        return gated_mlp(config, layer, x, ops)

    return decode(config, weights, ops.embedding(token_ids, weights["embedding"]), attention, mlp, ops)


def decode(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    residual: Tensor,  # [T, H], the embedded tokens
    attention: Callable[[int, LayerWeights, Tensor], Tensor],
    mlp: Callable[[LayerWeights, Tensor], Tensor],
    ops: Ops,
) -> Tensor:
    """Attention and MLP of every layer in turn, each behind a norm of the sum of all before it."""
    eps = config.rms_norm_eps
    layers = [layer_weights(weights, index) for index in range(config.num_layers)]
    next_norms = [layer.input_norm for layer in layers[1:]] + [weights["final_norm"]]
    x = ops.rms_norm(residual, layers[0].input_norm, eps)
    for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
        ops.show_residual(index, residual)
        x = attention(index, layer, x)
        x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
        x = mlp(layer, x)
        x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
    ops.show_residual(config.num_layers, residual)
    return x


def layer_weights(weights: Mapping[str, Tensor], index: int) -> LayerWeights:
    """A layer's weights, None for the biases that it lacks."""
    return LayerWeights(*[weights.get(f"layers.{index}.{name}") for name in LayerWeights._fields])  # type: ignore[arg-type]


def rotation_at(
    weights: Mapping[str, Tensor], positions: Tensor, table: str = "rope"
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, rotated / 2] of the positions."""
    cos, sin = weights[f"{table}_cos"], weights[f"{table}_sin"]
    return cos.index_select(0, positions), sin.index_select(0, positions)


def project(config: ModelConfig, layer: LayerWeights, x: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, Hq, D], key and value [T, Hkv, D] of normed hidden states [T, H], as views of one tensor."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = ops.linear(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, config.head_dim)
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]


def attention_output(
    index: int, layer: LayerWeights, query: Tensor, key: Tensor, value: Tensor, attend: Attend, ops: Ops
) -> Tensor:
    """What attention of a layer adds to the hidden states [T, H]."""
    out = query.new_empty(query.shape)
    attend(index, query, key, value, out)
    return ops.linear(out.flatten(1), layer.o, layer.o_bias)


def gated_mlp(config: ModelConfig, layer: LayerWeights, x: Tensor, ops: Ops) -> Tensor:
    """down(act(gate(x)) * up(x)) [T, H]"""
    gate_up = ops.linear(x, layer.gate_up, layer.gate_up_bias)
    act_and_mul = ops.silu_and_mul if config.hidden_act == "silu" else ops.gelu_and_mul
    return ops.linear(act_and_mul(gate_up), layer.down, layer.down_bias)


def logits(config: ModelConfig, weights: Mapping[str, Tensor], hidden: Tensor, ops: Ops) -> Tensor:
    """Scores [n, vocab] of the next token after hidden states [n, H]."""
    return ops.linear(hidden, weights["lm_head"])


LLAMA = ModelDefinition(parameters=parameters, forward=forward, logits=logits)
register_model("LlamaForCausalLM", LLAMA)
