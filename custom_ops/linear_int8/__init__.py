"""lamina::linear_int8."""
