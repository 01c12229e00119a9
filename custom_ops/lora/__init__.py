"""lamina::lora."""
