"""lamina::silu_and_mul."""
