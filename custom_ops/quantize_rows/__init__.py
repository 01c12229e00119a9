"""lamina::quantize_rows."""
