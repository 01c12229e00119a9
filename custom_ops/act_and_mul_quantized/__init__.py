"""lamina::act_and_mul_quantized."""
