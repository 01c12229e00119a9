"""lamina::lora_silu_and_mul."""
