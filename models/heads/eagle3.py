"""EAGLE-3: a LLaMA layer of embedding and state side by side, from three of the target's sums on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...common.errors import UnsupportedError
from ..config import ModelConfig
from ..families import llama
from ..fields import Fields
from ..layers import Attend, Ops
from ..registry import ParameterSpec, register_model
from .definition import STATES, HeadConfig, HeadDefinition, head_config
from .eagle1 import ends, run_layers

ARCHITECTURE = "Eagle3LlamaForCausalLM"
NUM_SUMS = 3  # that a head is given where its config names no layers


def config(fields: Fields) -> Mapping[str, Any]:
    """What only heads have, be it in an object of its own or beside all else."""
    nested = Fields(fields.object("eagle_config"), f"{fields.origin}, eagle_config")
    if fields.boolean("fc_norm", False) or nested.boolean("fc_norm", False):
        raise UnsupportedError(
            f"{fields.origin}: fc_norm is true; wanted false: a norm of each sum is not served"
        )
    if not nested.boolean("use_aux_hidden_state", True):
        raise UnsupportedError(
            f"{fields.origin}: use_aux_hidden_state is false; wanted a head that is given residual sums"
        )
    hidden = fields.integer("hidden_size")
    own = HeadConfig(
        draft_vocab_size=fields.integer("draft_vocab_size", fields.integer("vocab_size")),
        target_hidden_size=fields.integer("target_hidden_size", hidden),
        layers_read=_layers_read(fields, nested),
        norm_before_residual=fields.boolean("norm_before_residual", False),
        norm_before_fc=fields.boolean("norm_before_fc", False) or nested.boolean("norm_before_fc", False),
        norm_output=fields.boolean("norm_output", False),
    )
    return {"own": own, "tie_word_embeddings": False, "layer_types": ()}


def _layers_read(fields: Fields, nested: Fields) -> tuple[int, ...] | None:
    name = "eagle_aux_hidden_state_layer_ids"
    found = nested.token_ids(name) or fields.token_ids(name)
    return found or None


def parameters(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Every weight by name; the embedding is the target's where the checkpoint has none."""
    own, hidden = head_config(config), config.hidden_size
    columns = len(own.layers_read or range(NUM_SUMS)) * own.target_hidden_size
    specs = ends(config) | {
        "fc": ParameterSpec(shape=(hidden, columns), sources=(f"{own.prefix}fc.weight",), projection=True),
        "layers.0.hidden_norm": _norm(own, f"{own.first_layer}.hidden_norm", hidden),
        "final_norm": _norm(own, "norm", hidden),
    }
    if own.norm_before_fc:
        specs["input_norm"] = _norm(own, "input_norm", columns)
    for layer in range(config.num_layers):
        module = f"layers.{layer}" if layer else own.first_layer
        for name, spec in llama.layer_parameters(config, f"{own.prefix}{module}").items():
            is_wide = (layer, name) == (0, "qkv")
            specs[f"layers.{layer}.{name}"] = (
                replace(spec, shape=(spec.shape[0], 2 * hidden)) if is_wide else spec
            )
    return specs


def _norm(own: HeadConfig, module: str, size: int) -> ParameterSpec:
    return ParameterSpec(shape=(size,), sources=(f"{own.prefix}{module}.weight",))


def forward(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    token_ids: Tensor,  # [T] int32, each the token behind its position
    positions: Tensor,  # [T] int32
    attend: Attend,
    ops: Ops,
) -> Tensor:
    """The states [T, H] that the head goes on from at the next token."""
    own, eps, states = head_config(config), config.rms_norm_eps, weights[STATES]
    embedded = ops.embedding(token_ids, weights["embedding"])
    normed = ops.rms_norm(states, weights["layers.0.hidden_norm"], eps)
    x = torch.cat((ops.rms_norm(embedded, weights["layers.0.input_norm"], eps), normed), dim=-1)
    residual = normed if own.norm_before_residual else states
    out = run_layers(config, weights, x, residual, positions, attend, ops)
    return ops.rms_norm(out, weights["final_norm"], eps) if own.norm_output else out


def logits(config: ModelConfig, weights: Mapping[str, Tensor], hidden: Tensor, ops: Ops) -> Tensor:
    """Scores [n, draft vocab] of the next token after states [n, H]."""
    if not head_config(config).norm_output:
        hidden = ops.rms_norm(hidden, weights["final_norm"], config.rms_norm_eps)
    return llama.logits(config, weights, hidden, ops)


def combine(config: ModelConfig, weights: Mapping[str, Tensor], states: Tensor, ops: Ops) -> Tensor:
    """One projection of the target's residual sums side by side."""
    if head_config(config).norm_before_fc:
        states = ops.rms_norm(states, weights["input_norm"], config.rms_norm_eps)
    return ops.linear(states, weights["fc"])


def layers_read(head: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """The layers that the config names; else an early one, one in the middle and a late one."""
    return head_config(head).layers_read or (2, target.num_layers // 2, target.num_layers - 3)


EAGLE3 = HeadDefinition(
    parameters=parameters,
    forward=forward,
    logits=logits,
    config=config,
    combine=combine,
    layers_read=layers_read,
)
register_model(ARCHITECTURE, EAGLE3)
