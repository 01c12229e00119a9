"""lamina::attention_site."""
