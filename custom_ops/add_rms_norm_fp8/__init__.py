"""lamina::add_rms_norm_fp8."""
