"""lamina::rms_norm."""
