"""lamina::layer_norm."""
