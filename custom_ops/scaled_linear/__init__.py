"""lamina::scaled_linear."""
