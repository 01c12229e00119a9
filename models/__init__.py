"""Model definitions as pure functions, their configs and their weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .families import gemma2, gemma3, granite, llama, mistral, phi3, qwen2, qwen3, smollm3
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


if not TYPE_CHECKING:  # a checker that saw it would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Imported when first asked for: who reads tokenizers alone, as a server does, needs no torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        families = import_module(".families", __name__)
        home = families if hasattr(families, name) else import_module(".registry", __name__)
        value = globals()[name] = getattr(home, name)
        return value
