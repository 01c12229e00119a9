"""lamina::rms_norm_fp8."""
