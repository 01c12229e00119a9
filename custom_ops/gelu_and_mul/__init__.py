"""lamina::gelu_and_mul."""
