"""lamina::all_reduce, and the groups of ranks that it sums over."""
