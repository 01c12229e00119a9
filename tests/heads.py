"""Heads of random weights as they are published, and what transformers' own layers compute of them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
STD = 0.2


class HeadLayer(nn.Module):
    """A layer of transformers' parts; the first of EAGLE-3 takes two hidden states side by side."""

    def __init__(self, config: LlamaConfig, index: int, *, is_wide: bool, has_input_norm: bool) -> None:
        super().__init__()
        config._attn_implementation = "eager"
        self.self_attn = LlamaAttention(config, index)
        if is_wide:
            for name in ("q_proj", "k_proj", "v_proj"):
                rows = getattr(self.self_attn, name).out_features
                setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, rows, bias=False))
        self.mlp = LlamaMLP(config)
        if has_input_norm:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if is_wide:
            self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor, angles: Any) -> Tensor:
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        out, _ = self.self_attn(x, position_embeddings=angles, attention_mask=mask)
        residual = residual + out
        return residual + self.mlp(self.post_attention_layernorm(residual))


@dataclass(kw_only=True)
class RandomHead:
    """A head for a target of TINY's sizes; `changes` go into its config.json."""

    is_third: bool
    changes: dict[str, Any] = field(default_factory=dict)
    draft_vocab_size: int = 320
    num_sums: int = 3
    has_embedding: bool = True
    fc_bias: bool = False
    seed: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        sizes = SIZES | {name: value for name, value in self.changes.items() if name in SIZES}
        self.config = LlamaConfig(**sizes)
        hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.embed_tokens = nn.Embedding(sizes["vocab_size"], hidden)
            columns = self.num_sums * hidden if self.is_third else 2 * hidden
            self.fc = nn.Linear(columns, hidden, bias=self.fc_bias)
            self.layers = nn.ModuleList(
                [
                    HeadLayer(
                        self.config,
                        index,
                        is_wide=self.is_third and not index,
                        has_input_norm=self.is_third or index > 0,
                    )
                    for index in range(layers)
                ]
            )
            self.norm = LlamaRMSNorm(hidden, self.config.rms_norm_eps)
            self.input_norm = LlamaRMSNorm(columns, self.config.rms_norm_eps)
            self.lm_head = nn.Linear(hidden, self.draft_vocab_size, bias=False)
            ids = torch.randperm(sizes["vocab_size"])[: self.draft_vocab_size]
            self.target_ids = ids.sort().values
            self.rotary = LlamaRotaryEmbedding(self.config)
            for module in self._modules():
                for name, parameter in module.named_parameters():
                    mean = 1.0 if "norm" in name or isinstance(module, LlamaRMSNorm) else 0.0
                    nn.init.normal_(parameter, mean, STD)
                module.to(self.dtype)

    def _modules(self) -> list[nn.Module]:
        return [self.embed_tokens, self.fc, self.layers, self.norm, self.input_norm, self.lm_head]

    @torch.no_grad()
    def states(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """What the head goes on from [T, H], of tokens [T] and combined states [T, H]."""
        embedded, positions = self.embed_tokens(token_ids), torch.arange(len(token_ids))[None]
        angles = self.rotary(embedded[None], positions)
        if self.is_third:
            first: Any = self.layers[0]
            normed = first.hidden_norm(states)
            x = torch.cat((first.input_layernorm(embedded), normed), -1)
            residual = normed if self.norm_before_residual else states
        else:
            x = residual = self.fc(torch.cat((embedded, states), -1))
        x, residual = x[None], residual[None]
        for index, layer in enumerate(self.layers):
            if index:
                x = layer.input_layernorm(residual)  # type: ignore[operator]
            residual = layer(x, residual, angles)
        return self.norm(residual[0]) if self.norm_output else residual[0]

    @torch.no_grad()
    def combined(self, states: Tensor) -> Tensor:
        """Of the target's states [T, columns] what the head begins from [T, H]."""
        if not self.is_third:
            return states
        return self.fc(self.input_norm(states) if self.norm_before_fc else states)

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Scores [T, draft vocab] of EAGLE-3; those of EAGLE-1 are its target's."""
        return self.lm_head(states if self.norm_output else self.norm(states))

    def tensors(self, *, prefix: str = "", first_layer: str = "midlayer") -> dict[str, Tensor]:
        """By the names that published heads have."""
        first = first_layer if self.is_third else "layers.0"
        found = {f"{prefix}fc.{name}": value for name, value in self.fc.named_parameters()}
        if self.has_embedding:
            found[f"{prefix}embed_tokens.weight"] = self.embed_tokens.weight
        for index, layer in enumerate(self.layers):
            module = f"layers.{index}" if index else first
            found |= {f"{prefix}{module}.{name}": value for name, value in layer.named_parameters()}
        if self.is_third:
            found |= {f"{prefix}norm.weight": self.norm.weight, "lm_head.weight": self.lm_head.weight}
            found["d2t"] = self.target_ids - torch.arange(self.draft_vocab_size)
            found["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool)
            found["t2d"][self.target_ids] = True
            if self.norm_before_fc:
                found[f"{prefix}input_norm.weight"] = self.input_norm.weight
        return {name: value.detach().clone().contiguous() for name, value in found.items()}

    def json(self) -> dict[str, Any]:
        """Its config.json."""
        raw: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SIZES
        raw |= {
            "rms_norm_eps": self.config.rms_norm_eps,
            "torch_dtype": "float32",
            "tie_word_embeddings": False,
        }
        if self.is_third:
            raw["draft_vocab_size"] = self.draft_vocab_size
            for name in ("norm_before_residual", "norm_before_fc", "norm_output"):
                if getattr(self, name):
                    raw[name] = True
        return raw | self.changes

    def save(self, folder: Path, **names: str) -> Path:
        """The folder with a checkpoint of it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.json()))
        save_file(self.tensors(**names), folder / "model.safetensors")
        return folder
