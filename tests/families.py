"""Tiny models of every family, made by transformers, whose attention is far from uniform."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import create_chunked_causal_mask

WINDOW = 5
CHUNK = 7
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.7 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family by the prefix of its classes in transformers, and the config of one of its tiny models."""

    prefix: str
    changes: dict[str, Any] = field(default_factory=dict)
    config_class: str = ""

    @property
    def architecture(self) -> str:
        return f"{self.prefix}ForCausalLM"

    def config(self, **changes: Any) -> Any:
        name = self.config_class or f"{self.prefix}Config"
        config = getattr(transformers, name)(**SIZES | self.changes | changes)
        config.architectures = [self.architecture]
        return config

    def save(self, folder: Path, *, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
        """A float32 checkpoint with random weights, norms and biases included."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = getattr(transformers, self.architecture)(self.config(**changes)).float()
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):  # made alike, which would hide one that is dropped
                    parameter.data += 0.3 * torch.randn_like(parameter)
                elif name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.5)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder


FAMILIES = {
    "llama-chunks": Family(
        prefix="Llama",
        changes={
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention", "chunked_attention"],
            "attention_chunk_size": CHUNK,
        },
    ),
    "mistral": Family(prefix="Mistral", changes={"sliding_window": WINDOW}),
    "mistral-full": Family(
        prefix="Mistral", changes={"sliding_window": None, "head_dim": 24, "vocab_size": 323}
    ),
    "qwen2": Family(prefix="Qwen2", changes={"sliding_window": WINDOW}),
    "qwen2-windows": Family(
        prefix="Qwen2",
        changes={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": Family(prefix="Qwen3", changes={"head_dim": 32}),
    "qwen3-tied": Family(
        prefix="Qwen3", changes={"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "gemma2": Family(
        prefix="Gemma2",
        changes={
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Family(
        prefix="Gemma3",
        config_class="Gemma3TextConfig",
        changes={
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": Family(prefix="Phi3", changes={"sliding_window": WINDOW}),
    "phi3-longrope": Family(
        prefix="Phi3", changes={"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}
    ),
    "granite": Family(
        prefix="Granite",
        changes={
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.15,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3": Family(prefix="SmolLM3"),
    "smollm3-windows": Family(
        prefix="SmolLM3",
        changes={"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [0, 1, 1, 0]},
    ),
}


def oracle(folder: Path, architecture: str) -> Any:
    """transformers' own model, eager and in float32."""
    model = getattr(transformers, architecture)
    model = model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    kinds = getattr(model.config, "layer_types", None) or ()
    for layer, kind in zip(model.model.layers, kinds, strict=False):
        if kind == "chunked_attention":  # of which the LLaMA of transformers knows nothing, but its masks do
            layer.register_forward_pre_hook(_with_chunks(model.config), with_kwargs=True)
    return model


def _with_chunks(config: Any) -> Callable[..., Any]:
    parameters = inspect.signature(create_chunked_causal_mask).parameters.values()  # releases differ in them
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty][2:]

    def hook(layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        positions = {"cache_position": torch.arange(args[0].shape[1])}
        mask = create_chunked_causal_mask(config, args[0], **{name: positions.get(name) for name in required})
        return args, {**kwargs, "attention_mask": mask}

    return hook


def oracle_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """transformers' logits [T, vocab]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def oracle_choices(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """The likeliest token at each place of an answer, after the tokens before it: a greedy one is its own."""
    logits = oracle_logits(model, [*prompt, *answer])
    return [int(token) for token in logits[len(prompt) - 1 : -1].argmax(dim=-1)]
