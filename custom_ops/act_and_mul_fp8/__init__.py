"""lamina::act_and_mul_fp8."""
