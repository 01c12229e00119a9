"""lamina::sample."""
