"""lamina::keep_typical."""
