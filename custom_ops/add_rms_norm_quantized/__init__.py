"""lamina::add_rms_norm_quantized."""
