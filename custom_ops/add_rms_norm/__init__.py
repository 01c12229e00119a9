"""lamina::add_rms_norm."""
