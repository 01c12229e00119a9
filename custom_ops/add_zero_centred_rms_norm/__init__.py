"""lamina::add_zero_centred_rms_norm."""
