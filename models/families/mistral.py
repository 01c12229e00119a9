"""Mistral: LLaMA whose tokens may see a window alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import layer_types
from ..fields import Fields
from ..registry import register_model
from .llama import LLAMA


def config(fields: Fields) -> Mapping[str, Any]:
    """Every layer slides where a window is given; null means none."""
    window = fields.integer("sliding_window", None)
    types = layer_types(fields, sliding=lambda index: window is not None)
    return {"sliding_window": window, "layer_types": types}


DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
MISTRAL = dataclasses.replace(LLAMA, config=config, defaults=DEFAULTS)
register_model("MistralForCausalLM", MISTRAL)
