"""lamina::lora_add_rms_norm."""
