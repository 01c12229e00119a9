"""lamina::write_kv_cache."""
