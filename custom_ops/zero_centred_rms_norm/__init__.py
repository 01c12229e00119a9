"""lamina::zero_centred_rms_norm."""
