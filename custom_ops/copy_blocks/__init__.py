"""lamina::copy_blocks."""
