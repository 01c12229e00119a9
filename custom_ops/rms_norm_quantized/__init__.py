"""lamina::rms_norm_quantized."""
