"""lamina::paged_attention."""
