"""Model families, a file each; importing this registers them."""

from . import gemma2, gemma3, granite, llama, mistral, phi3, qwen2, qwen3, smollm3

__all__ = ["gemma2", "gemma3", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"]
