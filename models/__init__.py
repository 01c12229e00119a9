"""Model definitions as pure functions, their configs and their weights."""

from . import llama  # registers the built-in architectures
from .registry import ModelDefinition, ParameterSpec, find_model, register_model

__all__ = ["ModelDefinition", "ParameterSpec", "find_model", "llama", "register_model"]
