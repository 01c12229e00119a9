"""lamina::linear_silu_and_mul."""
