"""lamina::mlp_w8a8."""
