"""lamina::scaled_linear_fp8."""
