"""lamina::linear."""
