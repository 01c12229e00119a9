"""Lamina: a torch.compile-centred runtime for LLaMA-family language models."""
