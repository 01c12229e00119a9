"""A small LLaMA, or one of its kin, as the compiler is handed it, with weights and eager result."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina.compiler.compile import Program
from lamina.custom_ops.paged_attention.reference import dense_attention
from lamina.custom_ops.rotary_embedding.reference import rotary_embedding
from lamina.models import find_model
from lamina.models.checkpoints.weights import dummy_weights
from lamina.models.config import ModelConfig
from lamina.models.families import llama
from lamina.models.layers import EXACT_OPS, FAST_OPS, Ops
from lamina.models.rope import rotation_tables

CPU = torch.device("cpu")
SIZES = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A model without a checkpoint: its program for the compiler, and itself to compare with."""

    config: ModelConfig
    ops: Ops
    program: Program
    weights: dict[str, Tensor]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> None:
        if cos is not None and sin is not None:
            query, key = rotary_embedding(query, key, cos, sin)
        out.copy_(dense_attention(query, key, value, self.config.head_dim**-0.5))

    def tokens(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Ids and positions of a sequence, the same at every call."""
        generator = torch.Generator().manual_seed(num_tokens)
        ids = torch.randint(self.config.vocab_size, (num_tokens,), generator=generator, dtype=torch.int32)
        return ids, torch.arange(num_tokens, dtype=torch.int32)

    def eager(self, num_tokens: int) -> Tensor:
        with torch.no_grad():
            ids, positions = self.tokens(num_tokens)
            forward = find_model(self.config.architecture).forward
            return _forward(forward, self.config, self.ops, self.weights, ids, positions, self.attend)


def make_tiny(*, dtype: torch.dtype = torch.float32, exact: bool = False, **sizes: Any) -> Tiny:
    """A TINY model with some sizes changed."""
    config = ModelConfig(**SIZES | sizes)
    ops = EXACT_OPS if exact else FAST_OPS
    weights = dummy_weights(find_model(config.architecture), config, dtype=dtype, device=CPU, seed=0).by_name
    weights |= rotation_tables(config, max_model_len=256, dtype=dtype, device=CPU)
    program = Program(
        forward=partial(_forward, find_model(config.architecture).forward, config, ops),
        parameters={name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()},
        key={name: value for name, value in asdict(config).items() if name not in ("dtype", "rope")},
        sources=(Path(llama.__file__),),
        device=CPU,
    )
    return Tiny(config=config, ops=ops, program=program, weights=weights)


def _forward(
    forward: Any, config: ModelConfig, ops: Ops, weights: Any, ids: Tensor, positions: Tensor, attend: Any
) -> Tensor:
    hidden: Tensor = forward(config, weights, ids, positions, attend, ops)
    return hidden
