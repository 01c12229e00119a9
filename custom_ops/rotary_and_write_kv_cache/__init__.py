"""lamina::rotary_and_write_kv_cache."""
