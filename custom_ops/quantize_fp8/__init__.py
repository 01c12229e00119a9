"""lamina::quantize_fp8."""
