"""lamina::qk_norm."""
