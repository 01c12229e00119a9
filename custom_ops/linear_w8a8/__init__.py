"""lamina::linear_w8a8."""
