"""lamina::adjust_logits."""
