"""Model definitions as pure functions, their configs and their weights."""

from .families import (  # each registers itself
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from .registry import AttentionSpec, ModelDefinition, ParameterSpec, find_model, register_model

__all__ = [
    "AttentionSpec",
    "ModelDefinition",
    "ParameterSpec",
    "find_model",
    "gemma2",
    "gemma3",
    "granite",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "register_model",
    "smollm3",
]
