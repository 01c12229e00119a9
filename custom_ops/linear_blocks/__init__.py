"""lamina::linear_blocks."""
