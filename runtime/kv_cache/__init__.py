"""The paged KV cache: blocks, block tables, prefix cache and swap."""
