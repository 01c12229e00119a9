"""Checkpoints on disk and on the hub: safetensors, GGUF, tokenizer files."""
