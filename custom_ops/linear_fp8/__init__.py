"""lamina::linear_fp8."""
