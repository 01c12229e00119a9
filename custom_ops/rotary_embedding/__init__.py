"""lamina::rotary_embedding."""
