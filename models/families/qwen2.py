"""Qwen2 and Qwen2.5: LLaMA with biases on query, key and value, and windows in its upper layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig, layer_types
from ..fields import Fields
from ..registry import ParameterSpec, register_model
from . import llama

WINDOW_DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}


def config(fields: Fields) -> Mapping[str, Any]:
    """The window, which counts only with `use_sliding_window`, and the biases, which have no field."""
    return {**windows(fields), "attention_bias": True}


def windows(fields: Fields) -> Mapping[str, Any]:
    """Layers from `max_window_layers` on slide, where `layer_types` does not say which."""
    first = fields.integer("max_window_layers", minimum=0)
    window = fields.integer("sliding_window", None)
    if not fields.boolean("use_sliding_window", False):
        window = None
    types = layer_types(fields, sliding=lambda index: window is not None and index >= first)
    return {"sliding_window": window, "layer_types": types}


def parameters(config: ModelConfig) -> Mapping[str, ParameterSpec]:
    """LLaMA's, but for the bias of the output projection."""
    specs = llama.parameters(config)
    return {name: spec for name, spec in specs.items() if not name.endswith(".o_bias")}


QWEN2 = dataclasses.replace(llama.LLAMA, parameters=parameters, config=config, defaults=WINDOW_DEFAULTS)
register_model("Qwen2ForCausalLM", QWEN2)
