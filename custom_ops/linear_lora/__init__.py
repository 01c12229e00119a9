"""lamina::linear_lora."""
