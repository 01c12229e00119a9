"""lamina::add_rms_norm_linear."""
