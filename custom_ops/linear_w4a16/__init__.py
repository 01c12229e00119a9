"""lamina::linear_w4a16."""
